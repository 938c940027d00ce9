"""The exact softmax over the whole vocabulary: one linear map without bias (section 3.3 of the paper).

Shapes: N tokens, D width, V words.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm.output.base import IGNORE_INDEX, OutputLayer, Plan, draw


class FullSoftmax(OutputLayer):
    """p(word | hidden) proportional to exp(weight[word] . hidden)."""

    def __init__(self, *, width: int, vocab_size: int) -> None:
        super().__init__(width=width, vocab_size=vocab_size)
        self.weight = nn.Parameter(torch.empty(vocab_size, width).uniform_(-1 / math.sqrt(width), 1 / math.sqrt(width)))

    def loss(self, hidden: Tensor, targets: Tensor, plan: Plan | None = None) -> Tensor:  # noqa: ARG002
        num_scored = (targets != IGNORE_INDEX).sum().clamp(min=1)
        return self.nll(hidden, targets).sum() / num_scored

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits_NV = F.linear(hidden.flatten(0, -2), self.weight)
        nll_N = F.cross_entropy(logits_NV, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
        return nll_N.view(targets.shape)

    def log_prob(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight).log_softmax(-1)

    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        best = self.log_prob(hidden).topk(k)
        return best.values, best.indices

    def sample(
        self,
        hidden: Tensor,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        log_prob_NV = self.log_prob(hidden.flatten(0, -2))
        ids_N = draw(log_prob_NV, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        return ids_N.view(hidden.shape[:-1])
