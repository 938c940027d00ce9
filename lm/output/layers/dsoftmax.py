"""D-softmax (Chen et al. 2015) and D-softmax [*] (both in section 5): more capacity for more frequent words.

One softmax over all words, with a head and tails as in the adaptive softmax. D-softmax splits the hidden state into
disjoint slices, one per cluster: tail i sees a slice of D / 4^i, the head sees the rest. In D-softmax [*] the head sees
the full hidden state and tail i a learned projection of it to D / 4^i. Unlike in the adaptive softmax, every token is
scored against the whole vocabulary.

Shapes: N tokens, D width, V words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from lm.config.groups import plugin
from lm.output.base import Description, LayerSizes, describe_clusters
from lm.output.clusters.partition import (
    MIN_WIDTH,
    SHRINK,
    ClusteredConfig,
    check_cutoffs,
    cluster_sizes,
    projected_widths,
    sliced_widths,
)
from lm.output.layers.full import JointSoftmax


@dataclass
class DSoftmaxConfig(ClusteredConfig):
    """One softmax over all words; clusters see disjoint slices of the hidden state."""

    name: str = "dsoftmax"
    scores_all_words = True

    def max_tails(self, width: int) -> int:
        """Limit the number of tails so that the slices fit into the hidden width."""
        return next(n for n in range(super().max_tails(width), -1, -1) if SHRINK**n <= width)


@plugin("output", "dsoftmax", DSoftmaxConfig)
class DSoftmax(JointSoftmax):
    """score = weight[word] . (slice of hidden for the word's cluster)."""

    projects = False
    """Whether clusters see projections of the hidden state instead of slices."""

    def __init__(self, *, width: int, vocab_size: int, cutoffs: Sequence[int], min_width: int = MIN_WIDTH) -> None:
        super().__init__(width=width, vocab_size=vocab_size)
        self.cutoffs = check_cutoffs(cutoffs, vocab_size=vocab_size)
        self.sizes = cluster_sizes(self.cutoffs, vocab_size=vocab_size)
        num_tails = len(self.cutoffs)
        tails = projected_widths(width, num_tails=num_tails, min_width=min_width) if self.projects else []
        self.widths = [width, *tails] if self.projects else sliced_widths(width, num_tails=num_tails)
        shapes = zip(self.sizes, self.widths, strict=True)
        self.clusters = nn.ParameterList(nn.Parameter(torch.empty(*shape)) for shape in shapes)
        self.projections = nn.ParameterList(nn.Parameter(torch.empty(tail, width)) for tail in tails)
        self.reset_parameters()

    @classmethod
    def build(cls, settings: ClusteredConfig, sizes: LayerSizes) -> Self:
        cutoffs, vocab_size = settings.chosen_cutoffs, len(sizes.counts)
        return cls(width=sizes.width, vocab_size=vocab_size, cutoffs=cutoffs, min_width=settings.min_width)

    def views(self, hidden_ND: Tensor) -> Sequence[Tensor]:
        if not self.projects:
            return torch.split(hidden_ND, self.widths, dim=1)
        return [hidden_ND, *(F.linear(hidden_ND, projection) for projection in self.projections)]

    def weights(self) -> list[Tensor]:
        return list(self.clusters)

    def describe(self, counts: NDArray[Any] | None = None) -> Description:
        return super().describe(counts) | describe_clusters(self.sizes, self.widths, counts)


@dataclass
class DSoftmaxStarConfig(ClusteredConfig):
    """One softmax over all words; tails see narrow projections of the hidden state."""

    name: str = "dsoftmax_star"
    scores_all_words = True


@plugin("output", "dsoftmax_star", DSoftmaxStarConfig)
class DSoftmaxStar(DSoftmax):
    """score = weight[word] . (projection of hidden for the word's cluster)."""

    projects = True
