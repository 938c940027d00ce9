"""D-softmax (Chen et al. 2015; "D-softmax" in section 5): more capacity for more frequent words.

One softmax over all words. The hidden state is cut into disjoint slices, and the words of a cluster see only their
cluster's: tail i a slice of D / 4^i, the head what remains.

Shapes: N tokens, D width, V words.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lm.config.registry import plugin
from lm.output.clusters.partition import SHRINK, sliced_widths
from lm.output.clusters.settings import ClusteredConfig
from lm.output.joint import ClusteredSoftmax


@dataclass
class DSoftmaxConfig(ClusteredConfig):
    """One softmax over all words; clusters see disjoint slices of the hidden state."""

    name: str = "dsoftmax"
    scores_all_words = True

    def most_tails(self, width: int) -> int:
        """The clusters share the width, which must be enough for all of them."""
        return next(n for n in range(super().most_tails(width), -1, -1) if SHRINK**n <= width)


@plugin("output", "dsoftmax", DSoftmaxConfig)
class DSoftmax(ClusteredSoftmax):
    """score = weight[word] . the slice of hidden that belongs to the word's cluster."""

    @staticmethod
    def cluster_widths(width: int, *, num_tails: int) -> list[int]:
        return sliced_widths(width, num_tails=num_tails)

    def views(self, hidden_ND: Tensor) -> Sequence[Tensor]:
        return torch.split(hidden_ND, self.widths, dim=1)
