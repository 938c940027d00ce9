"""D-softmax (Chen et al. 2015; "D-softmax" in section 5): more capacity for more frequent words.

One softmax over all words. The hidden state is cut into disjoint slices, and the words of a cluster see only their
cluster's: tail i a slice of D / 4^i, the head what remains.

Shapes: N tokens, D width, V words.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lm.config.registry import plugin
from lm.output.base import Description, LayerSizes
from lm.output.clusters.partition import SHRINK, check_cutoffs, cluster_sizes, sliced_widths
from lm.output.clusters.settings import ClusteredConfig
from lm.output.joint import JointSoftmax


@dataclass
class DSoftmaxConfig(ClusteredConfig):
    """One softmax over all words; clusters see disjoint slices of the hidden state."""

    @property
    def scores_all_words(self) -> bool:
        return True

    def most_tails(self, width: int) -> int:
        """The clusters share the width, which must be enough for all of them."""
        return next(n for n in range(super().most_tails(width), -1, -1) if SHRINK**n <= width)


@plugin("output", "dsoftmax", DSoftmaxConfig)
class DSoftmax(JointSoftmax):
    """score = weight[word] . the slice of hidden that belongs to the word's cluster."""

    def __init__(
        self,
        *,
        width: int,
        vocab_size: int,
        cutoffs: Sequence[int],
        fused: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(width=width, vocab_size=vocab_size, fused=fused)
        self.cutoffs = check_cutoffs(cutoffs, vocab_size=vocab_size)
        self.sizes = cluster_sizes(self.cutoffs, vocab_size=vocab_size)
        self.widths = sliced_widths(width, num_tails=len(self.cutoffs))
        shapes = zip(self.sizes, self.widths, strict=True)
        self.clusters = nn.ParameterList(nn.Parameter(torch.empty(size, slice_)) for size, slice_ in shapes)
        self.reset_parameters(generator)

    @classmethod
    def build(cls, settings: DSoftmaxConfig, sizes: LayerSizes) -> "DSoftmax":
        fused, cutoffs = settings.fused, settings.cutoffs
        return cls(
            width=sizes.width, vocab_size=len(sizes.counts), cutoffs=cutoffs, fused=fused, generator=sizes.generator
        )

    def views(self, hidden_ND: Tensor) -> Sequence[Tensor]:
        return torch.split(hidden_ND, self.widths, dim=1)

    def weights(self) -> list[Tensor]:
        return list(self.clusters)

    def describe(self) -> Description:
        return super().describe() | self.describe_clusters(self.sizes, widths=self.widths)
