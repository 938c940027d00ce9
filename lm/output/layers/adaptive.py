"""The adaptive softmax (section 4): frequent words in the root, rare words in clusters that get narrower as they grow.

The head scores the k_h most frequent words and one entry per tail. Tail i projects the hidden state to D / 4^i and
scores its cluster's words. There is no bias and no non-linearity. With `shortlist=False` the head becomes a leaf like
the tails, under a root of J + 1 entries; the paper reports 5 to 10% higher perplexity for this.

Usage in any PyTorch model, in place of `nn.AdaptiveLogSoftmaxWithLoss`:

    from lm import AdaptiveSoftmax
    softmax = AdaptiveSoftmax(512, 44372, [2000, 10000])  # ids sorted by decreasing count
    softmax(hidden, targets).loss.backward()  # hidden (..., 512), targets (...); -100 is not scored

Shapes: N scored tokens, F tokens in all, D width, R entries in the root.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from lm.config.groups import plugin
from lm.output.base import IGNORE_INDEX, Description, LayerSizes, Plan, describe_clusters, flatten
from lm.output.clusters.partition import (
    SHRINK,
    ClusteredConfig,
    check_cutoffs,
    cluster_sizes,
    consecutive,
    projected_widths,
)
from lm.output.fused import softmax_losses
from lm.output.hierarchy import TailBatch, TwoLevelPlan, TwoLevelSoftmax
from lm.output.logits import sum_dtype
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


class LossOutput(NamedTuple):
    """Result of `AdaptiveSoftmax.forward`."""

    output: Tensor
    """Log-probability of each target, 0 if ignored; same shape as the targets."""
    loss: Tensor
    """The reduced loss."""


@plugin("output", "adaptive", AdaptiveConfig)
class AdaptiveSoftmax(TwoLevelSoftmax):
    """p(word) for head words, p(tail) p(word | tail) for the others."""

    def __init__(
        self,
        width: int,
        vocab_size: int,
        cutoffs: Sequence[int],
        *,
        shortlist: bool = True,
        head_bias: bool = False,
        widths: Sequence[int] | None = None,
        div_value: float | None = None,
    ) -> None:
        """`widths`: tail widths. Default: D / 4^i, at least 16; with `div_value`, D / div_value^i as in torch."""
        cutoffs = check_cutoffs(cutoffs, vocab_size=vocab_size)
        sizes = cluster_sizes(cutoffs, vocab_size=vocab_size)
        leaves, in_root = (sizes[1:], sizes[0]) if shortlist else (sizes, 0)
        super().__init__(width=width, vocab_size=vocab_size, shortlist=in_root, cluster_sizes=leaves)
        self.cutoffs = cutoffs
        if widths is None and div_value is None:
            widths = projected_widths(width, num_tails=len(cutoffs))
        self.widths = torch_widths(width, div_value or 1, len(cutoffs)) if widths is None else list(widths)
        # As a leaf, the head keeps the full width and needs no projection.
        self.leaf_widths = self.widths if shortlist else [width, *self.widths]
        self.head = nn.Parameter(torch.empty(in_root + len(leaves), width))
        self.head_bias = nn.Parameter(torch.empty(len(self.head))) if head_bias else None
        self.projections = nn.ParameterList(nn.Parameter(torch.empty(narrow, width)) for narrow in self.widths)
        shapes = zip(leaves, self.leaf_widths, strict=True)
        self.clusters = nn.ParameterList(nn.Parameter(torch.empty(size, narrow)) for size, narrow in shapes)
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(rename_from_torch)  # type: ignore[no-untyped-call]

    @classmethod
    def build(cls, settings: AdaptiveConfig, sizes: LayerSizes) -> "AdaptiveSoftmax":
        layer = cls(
            width=sizes.width,
            vocab_size=len(sizes.counts),
            cutoffs=settings.chosen_cutoffs,
            shortlist=settings.shortlist,
            head_bias=settings.head_bias,
            widths=projected_widths(sizes.width, num_tails=len(settings.chosen_cutoffs), min_width=settings.min_width),
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

    # ---- in place of torch's module -------------------------------------------------------------------------------

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        weights: Tensor | None = None,
        *,
        plan: Plan | None = None,
        ignore_index: int = IGNORE_INDEX,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> LossOutput:
        """Return the targets' log-probabilities and the loss, as `nn.AdaptiveLogSoftmaxWithLoss` does.

        `weights` are constant factors of the tokens' losses; the mean divides by their sum. `reduction` is mean, sum or
        none. Label smoothing applies to each softmax on the target's path: the head's and the cluster's; the
        log-probabilities then carry no gradient. With a `plan` of the same targets, no operation synchronizes.
        """
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction must be mean, sum or none; got {reduction!r}")
        target = target.masked_fill(target == ignore_index, IGNORE_INDEX)
        plan = plan or self.plan(target.cpu()).to(target.device)
        assert isinstance(plan, TwoLevelPlan)
        hidden_FD, target_F = flatten(input, target)
        scale_F = torch.full_like(target_F, plan.scale if reduction == "mean" else 1, dtype=sum_dtype(self.head))
        if weights is not None:
            scale_F = weights.flatten().to(scale_F).masked_fill(target_F == IGNORE_INDEX, 0)
            if reduction == "mean":
                scale_F = scale_F / scale_F.sum().clamp(min=torch.finfo(scale_F.dtype).tiny)
        reduced = reduction != "none"
        losses_F, loss = self._losses(hidden_FD, plan, scale_F, smoothing=label_smoothing, in_forward=reduced)
        if not reduced:
            loss = (losses_F * scale_F).view(target.shape)
        if label_smoothing:
            with torch.no_grad():
                losses_F, _ = self._losses(hidden_FD, plan, scale_F, smoothing=0.0, in_forward=False)
        return LossOutput(-losses_F.view(target.shape), loss)

    def _losses(
        self, hidden_FD: Tensor, plan: TwoLevelPlan, scale_F: Tensor, *, smoothing: float, in_forward: bool
    ) -> tuple[Tensor, Tensor]:
        """Return each token's loss, 0 if ignored, and their sum weighted by `scale_F`; see `softmax_losses`."""

        options: dict[str, Any] = {"smoothing": smoothing, "in_forward": in_forward}
        weight_RD, bias_R = self.root()
        root_N, loss = softmax_losses(
            plan.scored(hidden_FD), weight_RD, plan.root_N, scale_N=plan.scored(scale_F), bias_K=bias_R, **options
        )
        leaf_losses = [root_N[:0]]
        for rows, input_MD, weight_KD, _ in self.leaves(hidden_FD.index_select(0, plan.leaf_rows_M), plan.counts):
            scale_M = scale_F.index_select(0, plan.leaf_rows_M[rows])
            leaf_M, more = softmax_losses(input_MD, weight_KD, plan.leaf_M[rows], scale_N=scale_M, **options)
            leaf_losses, loss = [*leaf_losses, leaf_M], loss + more
        losses_F = plan.spread(root_N, hidden_FD.shape[:1])
        return losses_F.index_add(0, plan.leaf_rows_M, torch.cat(leaf_losses)), loss

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
        layer.load_state_dict(module.state_dict())
        return layer

    def to_torch(self) -> nn.AdaptiveLogSoftmaxWithLoss:
        """Return torch's module with a copy of this layer's weights; UserError if torch cannot express the layer."""
        factors = [SHRINK, *(self.width / width for width in self.widths[:1])]
        fitting = [f for f in factors if torch_widths(self.width, f, len(self.widths)) == self.widths]
        if not self.shortlist or not fitting:
            raise UserError(
                "Conversion to torch.nn.AdaptiveLogSoftmaxWithLoss requires a shortlist and tail widths that shrink by "
                f"a constant factor; got {'a' if self.shortlist else 'no'} shortlist and widths {self.widths}."
            )
        module = nn.AdaptiveLogSoftmaxWithLoss(
            self.width, self.vocab_size, self.cutoffs, div_value=fitting[0], head_bias=self.head_bias is not None
        ).to(self.head)
        state = self.state_dict()
        module.load_state_dict({theirs: state[ours] for ours, theirs in self.torch_names().items() if ours in state})
        return module

    def torch_names(self) -> dict[str, str]:
        """Names of this layer's parameters in the state dict of torch's module, which `load_state_dict` accepts too."""
        names = {"head": "head.weight", "head_bias": "head.bias"}
        for i in range(len(self.widths)):
            names |= {f"projections.{i}": f"tail.{i}.0.weight", f"clusters.{i}": f"tail.{i}.1.weight"}
        return names


def torch_widths(width: int, div_value: float, num_tails: int) -> list[int]:
    """Tail widths of torch's module."""
    return [int(width // div_value**power) for power in range(1, num_tails + 1)]


def rename_from_torch(layer: AdaptiveSoftmax, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename weights of torch's module in a state dict that is being loaded."""
    for ours, theirs in layer.torch_names().items():
        if prefix + theirs in state:
            state[prefix + ours] = state.pop(prefix + theirs)
