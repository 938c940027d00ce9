"""Linear interpolation of models, token by token: p(w) = sum of weight_k p_k(w).

Shapes: K models, N tokens.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lm.model.base import State
from lm.model.predictor import Predictions, Predictor
from lm.output.base import IGNORE_INDEX

SMALLEST_GAIN = 1e-7
"""EM ends when an iteration gains fewer nats per token than this."""
MOST_ITERATIONS = 200


class Mixture(Predictor):
    """Several models of the same vocabulary as one; the weights sum to one."""

    def __init__(self, members: Sequence[Predictor], weights: Sequence[float]) -> None:
        super().__init__()
        self.members, self.weights = nn.ModuleList(members), list(weights)
        self.vocab_size = members[0].vocab_size
        self.looks_back = max(member.looks_back for member in members)
        self.hidden_width = next((m.hidden_width for m in members if m.hidden_width is not None), None)

    @property
    def device(self) -> torch.device:
        devices = [member.device for member in self._predictors()]
        return next((device for device in devices if device.type != "cpu"), devices[0])

    def initial_state(self, num_streams: int) -> State:
        return [member.initial_state(num_streams) for member in self._predictors()]

    def read(self, words_TB: Tensor, state: State) -> tuple["MixedPredictions", State]:
        parts = [
            member.read(words_TB.to(member.device), s) for member, s in zip(self._predictors(), state, strict=True)
        ]
        return MixedPredictions([part for part, _ in parts], self.weights, self.device), [after for _, after in parts]

    def _predictors(self) -> list[Predictor]:
        return [member for member in self.members if isinstance(member, Predictor)]


class MixedPredictions(Predictions):
    def __init__(self, parts: Sequence[Predictions], weights: Sequence[float], device: torch.device) -> None:
        self.parts, self.weights, self.device = parts, weights, device
        self.hidden = next((part.hidden for part in parts if part.hidden is not None), None)

    def at(self, steps_N: Tensor, streams_N: Tensor) -> "MixedPredictions":
        return MixedPredictions([part.at(steps_N, streams_N) for part in self.parts], self.weights, self.device)

    def nll(self, targets: Tensor) -> Tensor:
        mixed = self._mixed([-part.nll(targets) for part in self.parts])
        return torch.where(targets == IGNORE_INDEX, 0, -mixed)

    def log_prob(self) -> Tensor:
        return self._mixed([part.log_prob() for part in self.parts])

    def _mixed(self, log_probs: Sequence[Tensor]) -> Tensor:
        total = torch.full_like(log_probs[0], -torch.inf, dtype=torch.float64, device=self.device)
        for weight, values in zip(self.weights, log_probs, strict=True):
            if weight > 0:
                total = torch.logaddexp(total, values.to(self.device, torch.float64) + math.log(weight))
        return total


def fit_weights(log_probs_KN: NDArray[np.float64]) -> tuple[list[float], list[float]]:
    """Weights that make the text likeliest, by expectation maximisation from equal ones.

    Also the log-likelihood per token before each iteration and after the last; it never falls.
    """
    num_models = len(log_probs_KN)
    weights_K = np.full(num_models, 1 / num_models)
    best_N = log_probs_KN.max(0)
    relative_KN = np.exp(log_probs_KN - best_N)  # against underflow
    trace: list[float] = []
    while True:
        mixed_N = weights_K @ relative_KN
        trace.append(float((np.log(mixed_N) + best_N).mean()))
        if len(trace) > MOST_ITERATIONS or (len(trace) > 1 and trace[-1] - trace[-2] < SMALLEST_GAIN):
            return weights_K.tolist(), trace
        updated_K = weights_K * (relative_KN / mixed_N).mean(1)
        weights_K = updated_K / updated_K.sum()
