"""Layers with one softmax over the whole vocabulary: they differ only in how words are scored.

Each segment of the vocabulary scores its words by a linear map of its own view of the hidden state; the full softmax
has one segment that sees all of it. What happens to the scores is the same for all of them.

Shapes: N scored tokens, D width, V words.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.data.plan import Plan
from lm.output.base import IGNORE_INDEX, OutputLayer, plan_scored, scored
from lm.output.fused import softmax_loss, softmax_nll
from lm.output.row_loss import cross_entropy


class JointSoftmax(OutputLayer):
    """p(word | hidden) proportional to exp(score), over all words at once."""

    def __init__(self, *, width: int, vocab_size: int, fused: bool = True) -> None:
        super().__init__(width=width, vocab_size=vocab_size)
        self.fused = fused

    @abstractmethod
    def views(self, hidden_ND: Tensor) -> Sequence[Tensor]:
        """What each segment sees of the hidden state, (N, D_i) each."""

    @abstractmethod
    def weights(self) -> Sequence[Tensor]:
        """The word vectors of each segment, (K_i, D_i) each; segments are in order of word ids."""

    def plan(self, targets: Tensor, *, generator: torch.Generator | None = None) -> Plan:  # noqa: ARG002
        self.check_range(targets)
        return plan_scored(targets)

    def loss(self, hidden: Tensor, targets: Tensor, plan: Plan | None = None) -> Tensor:
        plan = plan or self.plan(targets.cpu()).to(targets.device)
        hidden_ND, target_N = scored(hidden, targets, plan=plan)
        scale = 1 / max(1, len(target_N))
        return softmax_loss(
            self.views(hidden_ND),
            self.weights(),
            target_N,
            scale=scale,
            fused=self.fused,
            row_loss=cross_entropy(self.softmax_in_place),
        )

    @torch.no_grad()
    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        # Unscored targets are given a word and masked afterwards, so evaluation never synchronises.
        ignored = targets == IGNORE_INDEX
        target_N = targets.masked_fill(ignored, 0).flatten()
        nll_N = softmax_nll(self.views(hidden.flatten(0, -2)), self.weights(), target_N)
        return nll_N.view(targets.shape).masked_fill(ignored, 0)

    def log_prob(self, hidden: Tensor) -> Tensor:
        views = self.views(hidden.flatten(0, -2))
        scores_NV = torch.cat([F.linear(x, w) for x, w in zip(views, self.weights(), strict=True)], dim=-1)
        return scores_NV.log_softmax(-1).view(*hidden.shape[:-1], self.vocab_size)

    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        self.check_k(k)
        best = self.log_prob(hidden).topk(k)
        return best.values, best.indices
