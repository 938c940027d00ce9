"""D-softmax [*] (section 5): D-softmax improved, as the paper's authors do, by sharing the hidden state.

One softmax over all words; the head sees the whole hidden state, tail i a learnt projection of it to D / 4^i, as in the
adaptive softmax. Unlike there, every token is scored against the whole vocabulary.

Shapes: N tokens, D width, V words.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm.config.registry import plugin
from lm.output.base import Description, LayerSizes
from lm.output.clusters.partition import check_cutoffs, cluster_sizes, projected_widths
from lm.output.clusters.settings import ClusteredConfig
from lm.output.joint import JointSoftmax


@dataclass
class DSoftmaxStarConfig(ClusteredConfig):
    """One softmax over all words; tails see narrow projections of the hidden state."""

    @property
    def scores_all_words(self) -> bool:
        return True


@plugin("output", "dsoftmax_star", DSoftmaxStarConfig)
class DSoftmaxStar(JointSoftmax):
    """score = weight[word] . the projection of hidden that belongs to the word's cluster."""

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
        tails = projected_widths(width, num_tails=len(self.cutoffs))
        self.widths = [width, *tails]
        shapes = zip(self.sizes, self.widths, strict=True)
        self.clusters = nn.ParameterList(nn.Parameter(torch.empty(size, narrow)) for size, narrow in shapes)
        self.projections = nn.ParameterList(nn.Parameter(torch.empty(narrow, width)) for narrow in tails)
        self.reset_parameters(generator)

    @classmethod
    def build(cls, settings: DSoftmaxStarConfig, sizes: LayerSizes) -> "DSoftmaxStar":
        fused, cutoffs = settings.fused, settings.cutoffs
        return cls(
            width=sizes.width, vocab_size=len(sizes.counts), cutoffs=cutoffs, fused=fused, generator=sizes.generator
        )

    def views(self, hidden_ND: Tensor) -> list[Tensor]:
        return [hidden_ND, *(F.linear(hidden_ND, projection) for projection in self.projections)]

    def weights(self) -> list[Tensor]:
        return list(self.clusters)

    def describe(self) -> Description:
        return super().describe() | self.describe_clusters(self.sizes, widths=self.widths)
