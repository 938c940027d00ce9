"""The full softmax trained to be normalised by itself (Devlin et al. 2014; Andreas and Klein 2015).

The loss has a second term, alpha (log Z)^2, that keeps the sum of the exponentiated scores near one. Then a score can
pass for a log-probability, and scoring a word costs one product of two vectors instead of one per word of the
vocabulary: `evaluate.normalize=false`. Scores begin at the log-frequency of the word, so log Z begins near zero.

Shapes: n tokens of a chunk, V words.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from numpy.typing import NDArray
from torch import Tensor

from lm.config.groups import OutputConfig
from lm.config.registry import plugin
from lm.config.rules import Range
from lm.data.plan import Plan
from lm.output.base import LayerSizes
from lm.output.layers.full import FullSoftmax
from lm.output.row_loss import RowLoss
from lm.output.sampling import log_unigram


@dataclass
class SelfNormalizedConfig(OutputConfig):
    """Full softmax whose scores need no normaliser."""

    name: str = "self_normalized"
    alpha: Annotated[float, Range(least=0)] = 1.0
    """Weight of (log Z)^2 in the loss: more brings log Z closer to zero, and costs perplexity."""


@plugin("output", "self_normalized", SelfNormalizedConfig)
class SelfNormalizedSoftmax(FullSoftmax):
    """The full softmax, with a penalty that keeps log Z near zero."""

    self_normalized = True

    def __init__(self, *, counts: NDArray[Any], alpha: float, **options: Any) -> None:
        super().__init__(vocab_size=len(counts), offset=log_unigram(counts), **options)
        self.alpha = alpha

    @classmethod
    def build(cls, settings: SelfNormalizedConfig, sizes: LayerSizes) -> "SelfNormalizedSoftmax":
        return cls(width=sizes.width, counts=sizes.counts, alpha=settings.alpha, fused=settings.fused)

    def row_loss(self, plan: Plan) -> RowLoss:  # noqa: ARG002
        def plain(logits_nV: Tensor, target_n1: Tensor) -> Tensor:
            log_z_n1 = logits_nV.logsumexp(1, keepdim=True)
            return log_z_n1 - logits_nV.gather(1, target_n1) + self.alpha * log_z_n1**2

        def in_place(logits_nP: Tensor, target_n1: Tensor) -> Tensor:
            score_n1 = logits_nP.gather(1, target_n1)
            nll_n1 = self.softmax_in_place(logits_nP, target_n1)
            log_z_n1 = nll_n1 + score_n1
            logits_nP.mul_(1 + 2 * self.alpha * log_z_n1)
            logits_nP.scatter_add_(1, target_n1, logits_nP.new_full(target_n1.shape, -1))
            return nll_n1 + self.alpha * log_z_n1**2

        return RowLoss(in_place, plain)
