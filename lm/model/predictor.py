"""The interface of models that read words and predict the next one: neural models, n-grams, mixtures and caches.

Evaluation, scoring, top-k and generation use only this interface. A predictor reads words into a state, like a core's:
a tree of tensors with the streams on dimension 1. Its distributions after each word are `Predictions`.

Shapes: T steps, B streams, N positions, V words.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lm.model.base import State
from lm.output.base import COLD, OutputLayer
from lm.output.drawing import check_sampling, entry_at
from lm.output.maxent import NgramContexts
from lm.system.errors import UserError


class Predictions(ABC):
    """A distribution over the vocabulary at each position; positions are (T, B), or (N,) after `at`."""

    hidden: Tensor | None = None
    """The hidden states behind them, (..., D), if a neural model made them."""

    @abstractmethod
    def at(self, steps_N: Tensor, streams_N: Tensor) -> "Predictions":
        """The predictions after these steps of these streams."""

    @abstractmethod
    def nll(self, targets: Tensor) -> Tensor:
        """-log p(target) at each position, 0 if the target is ignored; shaped as the targets."""

    @abstractmethod
    def log_prob(self) -> Tensor:
        """The log-distribution at each position, (..., V)."""

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """The k likeliest words: (log-probabilities, ids), both (..., k), likeliest first."""
        best = self.log_prob().topk(k)
        return best.values, best.indices

    @torch.no_grad()
    def sample(
        self,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        without: int | None = None,
        uniform: Tensor,
    ) -> Tensor:
        """One word per position; for the arguments see `OutputLayer.sample`."""
        check_sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        scores_NV = self.log_prob().double()
        if without is not None:
            scores_NV[:, without] = -torch.inf
        if temperature < COLD:
            return scores_NV.argmax(-1)
        scores_NV /= temperature
        if top_k is None and top_p in (None, 1):
            return entry_at(scores_NV.softmax(-1), uniform)[0]
        best_Nk, ids_Nk = scores_NV.topk(min(top_k or scores_NV.size(-1), scores_NV.size(-1)))
        probs_Nk = best_Nk.softmax(-1)
        if top_p is not None:
            probs_Nk = probs_Nk.masked_fill(probs_Nk.cumsum(-1) - probs_Nk >= top_p, 0)
        return ids_Nk.gather(-1, entry_at(probs_Nk, uniform)[0][:, None]).squeeze(-1)


class Predictor(nn.Module, ABC):
    """Reads words and predicts the next one."""

    vocab_size: int
    cutoffs: Sequence[int] = ()
    """Word ids at which clusters begin, for models that cut their vocabulary by frequency."""
    looks_back: int = 0
    """Warm-up words that must be read for exact predictions."""
    hidden_width: int | None = None
    """Width of the hidden states of its predictions, if there are any."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of words and predictions."""

    @abstractmethod
    def initial_state(self, num_streams: int) -> State:
        """The state before the first word."""

    @abstractmethod
    def read(self, words_TB: Tensor, state: State) -> tuple[Predictions, State]:
        """Predictions after each word, and the state after the last one."""

    def ids_of_unseen(self, words: Sequence[str]) -> list[int] | None:  # noqa: ARG002
        """Ids under which `read` accepts words outside the vocabulary; None if they are `<unk>` to the model."""
        return None

    def check_k(self, k: int) -> None:
        if not 1 <= k <= self.vocab_size:
            raise UserError(f"k must be from 1 to the vocabulary's size ({self.vocab_size}); got {k}.")


class HiddenPredictions(Predictions):
    """The predictions of an output layer, which computes only the part of the distribution that is needed.

    With n-gram weights, top-k and sampling use the whole distribution.
    """

    hidden: Tensor

    def __init__(self, hidden: Tensor, output: OutputLayer, contexts: NgramContexts | None = None) -> None:
        """`contexts` are the histories of the n-gram weights, if there are any."""
        self.hidden, self.output, self.contexts = hidden, output, contexts

    def at(self, steps_N: Tensor, streams_N: Tensor) -> "HiddenPredictions":
        contexts = self.contexts
        if contexts is not None:
            contexts = contexts._replace(hashes=contexts.hashes[steps_N, streams_N])
        return HiddenPredictions(self.hidden[steps_N, streams_N], self.output, contexts)

    def nll(self, targets: Tensor) -> Tensor:
        return self.output.nll(self.hidden, targets, self.contexts)

    @torch.no_grad()
    def log_prob(self) -> Tensor:
        return self.output.log_prob(self.hidden, self.contexts)

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        return self.output.topk(self.hidden, k) if self.contexts is None else super().topk(k)

    def sample(self, **how: Any) -> Tensor:
        return self.output.sample(self.hidden, **how) if self.contexts is None else super().sample(**how)
