"""BlackOut (Ji et al. 2015): a weighted softmax over the target and the step's S draws, trained to tell them apart.

With weights 1/q, and the draws of a word counted as often as it was drawn,

    p~(word) = exp(s) / q, divided by the same summed over the target and the draws other than it,
    loss = -log p~(target) - sum over these draws of log(1 - p~(draw)).

This is noise-contrastive estimation whose normaliser is estimated from the same sample. Evaluation is exact over the
whole vocabulary.

Shapes: n tokens of a chunk, U words of a step, V words.
"""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from lm.config.registry import plugin
from lm.config.rules import Range
from lm.data.plan import Plan
from lm.output.row_loss import RowLoss
from lm.output.sampling import SampledLayer, Sampler, SamplingConfig

LEAST_REST = 1e-5
"""1 - p~(draw) is not taken to be less: its log would be all rounding. The target's own term goes on pulling."""


@dataclass
class BlackOutConfig(SamplingConfig):
    """BlackOut: discriminative training against a weighted sample, exact in evaluation."""

    name: str = "blackout"
    sampler: Sampler = Sampler.power
    power: Annotated[float, Range(least=0, most=1)] = 0.4


@plugin("output", "blackout", BlackOutConfig)
class BlackOut(SampledLayer):
    """The full softmax's scores, trained to set the target apart from a weighted sample."""

    def bias(self, rows_U: Tensor, times_U: Tensor) -> Tensor:
        # One column stands for all draws of its word.
        return times_U.double().clamp(min=1).log() - self.probability_V[rows_U].log()

    def row_loss(self, plan: Plan) -> RowLoss:
        times_U = plan.tensors["times"].clamp(min=1).to(self.table.weight.dtype)

        def single(logits: Tensor, target_n1: Tensor) -> Tensor:
            """The target counts once, however often it was drawn."""
            return logits.scatter_add(1, target_n1, -times_U.log()[target_n1])

        def rest(probs_nU: Tensor, target_n1: Tensor) -> Tensor:
            """1 - p~ of each draw; 1 for the target, which is none of them."""
            return (1 - probs_nU / times_U).scatter(1, target_n1, 1.0).clamp_(min=LEAST_REST)

        def plain(logits_nU: Tensor, target_n1: Tensor) -> Tensor:
            log_probs_nU = single(logits_nU, target_n1).log_softmax(1)
            draws_n = rest(log_probs_nU.exp(), target_n1).log() @ times_U
            return -log_probs_nU.gather(1, target_n1) - draws_n[:, None]

        def in_place(logits_nP: Tensor, target_n1: Tensor) -> Tensor:
            logits_nP.scatter_add_(1, target_n1, -times_U.log()[target_n1])
            loss_n1 = self.softmax_in_place(logits_nP, target_n1)
            probs_nU = logits_nP[:, : len(times_U)]
            rest_nU = rest(probs_nU, target_n1)
            loss_n1 -= (rest_nU.log() @ times_U)[:, None]
            # d loss / d p~ of the draws, times p~; nothing for the target and where the rest is held at its least.
            pull_nU = (probs_nU / rest_nU).masked_fill_(rest_nU <= LEAST_REST, 0).scatter_(1, target_n1, 0.0)
            probs_nU.mul_(1 - pull_nU.sum(1, keepdim=True)).add_(pull_nU)
            probs_nU.scatter_add_(1, target_n1, probs_nU.new_full(target_n1.shape, -1))
            return loss_n1

        return RowLoss(in_place, plain)
