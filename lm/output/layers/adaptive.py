"""The adaptive softmax (section 4): frequent words in the root, rare words in clusters that get narrower as they grow.

The head scores the k_h most frequent words and one entry per tail. Tail i projects the hidden state to D / 4^i and
scores its cluster's words. There is no bias and no non-linearity. With `shortlist=False` the head becomes a leaf like
the tails, under a root of J + 1 entries; the paper reports 5 to 10% higher perplexity for this.

Usage in any PyTorch model:

    from lm.output.layers.adaptive import AdaptiveSoftmax
    layer = AdaptiveSoftmax(width=512, vocab_size=44372, cutoffs=[2000, 10000])  # ids sorted by decreasing count
    layer.loss(hidden, targets).backward()  # hidden (..., 512), targets (...); -100 is not scored

Shapes: N tokens, D width, R entries in the root.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from lm.config.registry import plugin
from lm.output.base import Description, LayerSizes, describe_clusters
from lm.output.clusters.partition import (
    SHRINK,
    ClusteredConfig,
    check_cutoffs,
    cluster_sizes,
    consecutive,
    projected_widths,
)
from lm.output.hierarchy import TailBatch, TwoLevelSoftmax
from lm.system.errors import UserError


@dataclass
class AdaptiveConfig(ClusteredConfig):
    """Adaptive softmax: frequent words in the head, the rest in tails that are computed only when needed."""

    name: str = "adaptive"
    shortlist: bool = True
    """Whether the root scores the head's words next to the tails; false makes the head a cluster below the root."""
    head_bias: bool = False
    """Trained bias, initialized to the log-frequencies of head words and tails; the paper uses none."""

    supports_maxent = True


@plugin("output", "adaptive", AdaptiveConfig)
class AdaptiveSoftmax(TwoLevelSoftmax):
    """p(word) for head words, p(tail) p(word | tail) for the others."""

    def __init__(
        self,
        *,
        width: int,
        vocab_size: int,
        cutoffs: Sequence[int],
        shortlist: bool = True,
        head_bias: bool = False,
        widths: Sequence[int] | None = None,
    ) -> None:
        """If `widths` is None, tail i has width D / 4^i, at least 16."""
        cutoffs = check_cutoffs(cutoffs, vocab_size=vocab_size)
        sizes = cluster_sizes(cutoffs, vocab_size=vocab_size)
        leaves, in_root = (sizes[1:], sizes[0]) if shortlist else (sizes, 0)
        super().__init__(width=width, vocab_size=vocab_size, shortlist=in_root, cluster_sizes=leaves)
        self.cutoffs = cutoffs
        self.widths = list(widths) if widths is not None else projected_widths(width, num_tails=len(cutoffs))
        # As a leaf, the head keeps the full width and needs no projection.
        self.leaf_widths = self.widths if shortlist else [width, *self.widths]
        self.head = nn.Parameter(torch.empty(in_root + len(leaves), width))
        self.head_bias = nn.Parameter(torch.empty(len(self.head))) if head_bias else None
        self.projections = nn.ParameterList(nn.Parameter(torch.empty(narrow, width)) for narrow in self.widths)
        shapes = zip(leaves, self.leaf_widths, strict=True)
        self.clusters = nn.ParameterList(nn.Parameter(torch.empty(size, narrow)) for size, narrow in shapes)
        self.reset_parameters()

    @classmethod
    def build(cls, settings: AdaptiveConfig, sizes: LayerSizes) -> "AdaptiveSoftmax":
        layer = cls(
            width=sizes.width,
            vocab_size=len(sizes.counts),
            cutoffs=settings.cutoffs,
            shortlist=settings.shortlist,
            head_bias=settings.head_bias,
            widths=projected_widths(sizes.width, num_tails=len(settings.cutoffs), min_width=settings.min_width),
        )
        if layer.head_bias is not None:
            counts, first = np.maximum(sizes.counts, 1).astype(np.float64), layer.shortlist
            entries = np.concatenate([counts[:first], np.add.reduceat(counts, np.array(layer.starts()[:-1], int))])
            with torch.no_grad():
                layer.head_bias.copy_(torch.from_numpy(np.log(entries / counts.sum())))
        return layer

    def root(self) -> tuple[Tensor, Tensor | None]:
        return self.head, self.head_bias

    def word_vectors(self) -> list[Tensor]:
        assert self.shortlist, "the head's words are in the root"
        return [self.head, *self.clusters]

    def rows_by_word(self) -> list[tuple[Tensor, list[int]]] | None:
        entries = [*range(self.shortlist), *range(-1, -1 - len(self.clusters), -1)]
        root = [(table, entries) for table in (self.head, self.head_bias) if table is not None]
        return [*root, *consecutive(self.clusters, first=self.shortlist)]

    def leaves(self, hidden_MD: Tensor, counts: Sequence[int]) -> Iterator[TailBatch]:
        edges = list(accumulate(counts, initial=0))
        # A single split, whose backward is one concatenation; separate slices would each add M x D zeros.
        for cluster, part_mD in enumerate(torch.split(hidden_MD, list(counts))):
            rows = slice(edges[cluster], edges[cluster + 1])
            yield TailBatch(rows, self._project(part_mD, cluster), self.clusters[cluster])

    def leaf_scores(self, hidden_ND: Tensor, cluster: int) -> Tensor:
        return F.linear(self._project(hidden_ND, cluster), self.clusters[cluster])

    def _project(self, hidden_ND: Tensor, cluster: int) -> Tensor:
        tail = cluster - (len(self.clusters) - len(self.projections))
        return hidden_ND if tail < 0 else F.linear(hidden_ND, self.projections[tail])

    def describe(self, counts: NDArray[Any] | None = None) -> Description:
        sizes = cluster_sizes(self.cutoffs, vocab_size=self.vocab_size)
        return super().describe(counts) | describe_clusters(sizes, [self.width, *self.widths], counts)

    # ---- conversion from and to torch's module ----

    @classmethod
    def from_torch(cls, module: nn.AdaptiveLogSoftmaxWithLoss) -> "AdaptiveSoftmax":
        """Build a layer from a copy of the weights of torch's module; probabilities are identical."""
        layer = cls(
            width=module.in_features,
            vocab_size=module.n_classes,
            cutoffs=module.cutoffs[:-1],
            head_bias=module.head.bias is not None,
            widths=[len(next(tail.parameters())) for tail in module.tail],
        ).to(module.head.weight)
        with torch.no_grad():
            for ours, theirs in layer._pairs(module):
                ours.copy_(theirs)
        return layer

    def to_torch(self) -> nn.AdaptiveLogSoftmaxWithLoss:
        """Return torch's module with a copy of this layer's weights; UserError if torch cannot express the layer."""
        factors = [SHRINK, *(self.width / width for width in self.widths[:1])]
        powers = range(1, len(self.widths) + 1)
        fitting = [f for f in factors if [int(self.width // f**power) for power in powers] == self.widths]
        if not self.shortlist or not fitting:
            raise UserError(
                "Conversion to torch.nn.AdaptiveLogSoftmaxWithLoss requires a shortlist and tail widths that shrink by "
                f"a constant factor; got {'a' if self.shortlist else 'no'} shortlist and widths {self.widths}."
            )
        module = nn.AdaptiveLogSoftmaxWithLoss(
            self.width, self.vocab_size, self.cutoffs, div_value=fitting[0], head_bias=self.head_bias is not None
        ).to(self.head)
        with torch.no_grad():
            for ours, theirs in self._pairs(module):
                theirs.copy_(ours)
        return module

    def _pairs(self, module: nn.AdaptiveLogSoftmaxWithLoss) -> Iterator[tuple[Tensor, Tensor]]:
        """Pair this layer's parameters with those of torch's module."""
        yield self.head, module.head.weight
        if self.head_bias is not None:
            yield self.head_bias, module.head.bias
        for tail, *ours in zip(module.tail, self.projections, self.clusters, strict=True):
            yield from zip(ours, tail.parameters(), strict=True)
