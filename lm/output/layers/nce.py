"""Noise-contrastive estimation (Gutmann and Hyvärinen 2010; Mnih and Teh 2012): distinguish targets from noise words.

The model's score s is taken for a log-probability, up to one constant: p(word) = exp(s - log Z). Each target is to be
distinguished from the step's S noise words by

    P(not noise) = sigmoid(s - log Z - log(S q)).

As S grows, its gradient becomes the full softmax's, for a model that is normalised by itself. Scores begin at the
log-frequency of the word plus log Z, so it is normalised when training starts. Evaluation is exact over the whole
vocabulary; `evaluate.normalize=false` skips the normaliser.

Shapes: n tokens of a chunk, U words of a step, V words.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from lm.config.registry import plugin
from lm.data.plan import Plan
from lm.output.fused import Columns
from lm.output.row_loss import RowLoss
from lm.output.sampling import SampledLayer, SamplingConfig, log_unigram

LEARNED = "learned"


@dataclass
class NCEConfig(SamplingConfig):
    """Noise-contrastive estimation, exact in evaluation."""

    name: str = "nce"
    log_z: Any = 0.0
    """The constant that scores are normalised with: a number, or `learned`."""

    def problems(self) -> Iterator[str]:
        is_number = type(self.log_z) in (int, float) and math.isfinite(self.log_z)
        if self.log_z != LEARNED and not is_number:
            yield f"output.log_z must be a number or {LEARNED}; got {self.log_z!r}. Try output.log_z=0"


@plugin("output", "nce", NCEConfig)
class NCE(SampledLayer):
    """Scores that are trained to be log-probabilities, one logistic regression per word of the sample."""

    self_normalized = True

    def __init__(self, settings: NCEConfig, *, counts: NDArray[Any], **sizes: Any) -> None:
        fixed = 0.0 if settings.log_z == LEARNED else float(settings.log_z)
        start = log_unigram(counts) + fixed  # normalised from the first step on
        super().__init__(settings, counts=counts, offset=start, **sizes)
        self.log_z = nn.Parameter(torch.zeros(1)) if settings.log_z == LEARNED else fixed
        self.bias_V = torch.from_numpy(start) - (self.num_samples * self.probability_V).log()

    def assumed_log_z(self) -> Tensor | float:
        return self.log_z

    def bias(self, rows_U: Tensor, times_U: Tensor) -> Tensor:  # noqa: ARG002
        return self.bias_V[rows_U]

    def columns(self, plan: Plan, *, dtype: torch.dtype) -> Columns:
        return Columns(plan.tensors["bias"].to(dtype) - self.log_z)

    def row_loss(self, plan: Plan) -> RowLoss:
        times_U = plan.tensors["times"].to(self.table.weight.dtype)

        def plain(logits_nU: Tensor, target_n1: Tensor) -> Tensor:
            noise_n = F.softplus(logits_nU) @ times_U
            return noise_n[:, None] + F.softplus(-logits_nU.gather(1, target_n1))

        def in_place(logits_nP: Tensor, target_n1: Tensor) -> Tensor:
            logits_nU = logits_nP[:, : len(times_U)]
            loss_n1 = plain(logits_nU, target_n1)
            told_n1 = logits_nU.gather(1, target_n1).sigmoid()
            logits_nU.sigmoid_().mul_(times_U)
            logits_nU.scatter_add_(1, target_n1, told_n1 - 1)
            return loss_n1

        return RowLoss(in_place, plain)
