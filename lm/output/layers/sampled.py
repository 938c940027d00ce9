"""The sampled softmax (importance sampling; "sampling" in section 5): trained against a sample of the vocabulary.

Of the words that a step draws, the distinct ones count once each. A word is among them with probability
1 - (1 - q)^S; its logit is lowered by the log of that, so that the sampled sum is an estimate of the full one. The
target always takes part; where it was also drawn it counts once. As S grows the loss becomes the full softmax's.
Evaluation and inference are exact over the whole vocabulary.

Shapes: V words, U rows of a step.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lm.config.registry import plugin
from lm.data.plan import Plan
from lm.output.row_loss import RowLoss, cross_entropy
from lm.output.sampling import SampledLayer, SamplingConfig


@dataclass
class SampledConfig(SamplingConfig):
    """Sampled softmax, exact in evaluation."""

    name: str = "sampled"


@plugin("output", "sampled", SampledConfig)
class SampledSoftmax(SampledLayer):
    """The full softmax, trained on samples."""

    def __init__(self, settings: SamplingConfig, **sizes: Any) -> None:
        super().__init__(settings, **sizes)
        with np.errstate(divide="ignore"):  # a word that is always drawn: log(1 - 1)
            inclusion = -np.expm1(self.num_samples * np.log1p(-self.probability_V.numpy()))
        self.correction_V = torch.from_numpy(-np.log(inclusion))

    def bias(self, rows_U: Tensor, times_U: Tensor) -> Tensor:  # noqa: ARG002
        return self.correction_V[rows_U]

    def row_loss(self, plan: Plan) -> RowLoss:  # noqa: ARG002
        return cross_entropy(self.softmax_in_place)
