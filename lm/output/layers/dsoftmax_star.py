"""D-softmax [*] (section 5): D-softmax improved, as the paper's authors do, by sharing the hidden state.

One softmax over all words; the head sees the whole hidden state, tail i a learnt projection of it to D / 4^i, as in the
adaptive softmax. Unlike there, every token is scored against the whole vocabulary.

Shapes: N tokens, D width, V words.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm.config.registry import plugin
from lm.output.clusters.partition import projected_widths
from lm.output.clusters.settings import ClusteredConfig
from lm.output.joint import ClusteredSoftmax


@dataclass
class DSoftmaxStarConfig(ClusteredConfig):
    """One softmax over all words; tails see narrow projections of the hidden state."""

    name: str = "dsoftmax_star"
    scores_all_words = True


@plugin("output", "dsoftmax_star", DSoftmaxStarConfig)
class DSoftmaxStar(ClusteredSoftmax):
    """score = weight[word] . the projection of hidden that belongs to the word's cluster."""

    @staticmethod
    def cluster_widths(width: int, *, num_tails: int) -> list[int]:
        return [width, *projected_widths(width, num_tails=num_tails)]

    def make_views(self) -> None:
        self.projections = nn.ParameterList(nn.Parameter(torch.empty(tail, self.width)) for tail in self.widths[1:])

    def views(self, hidden_ND: Tensor) -> list[Tensor]:
        return [hidden_ND, *(F.linear(hidden_ND, projection) for projection in self.projections)]
