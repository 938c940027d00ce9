"""The contract of output layers.

An output layer turns hidden states into a distribution over the vocabulary, p(word | hidden), and into a training
loss. Training, evaluation and generation use a layer only through this contract, so a new layer edits no other file.

Shapes: N tokens (any leading shape is accepted and flattened), D width of the hidden state, V words.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lm.config.groups import OutputConfig
from lm.config.registry import find_plugin
from lm.data.batches import to_device
from lm.output.maxent import NgramContexts, NgramPlan, NgramScores, SoftmaxRows
from lm.system.errors import UserError

if TYPE_CHECKING:
    from lm.data.corpus import Corpus

IGNORE_INDEX = -100
"""Targets with this value are not scored: padding, and the unscored warm-up of an evaluation piece."""

Description = dict[str, Any]
"""A layer's structure as plain values."""


class LayerSizes(NamedTuple):
    """The vocabulary and the hidden states that a layer is built for."""

    width: int
    """Width of the hidden states."""
    counts: NDArray[Any]
    """Training count of each word, in decreasing order."""
    classes: NDArray[Any] | None = None
    """Result of `OutputLayer.word_classes`; without it, a layer can be built to load trained weights into."""


@dataclass(frozen=True)
class Plan:
    """Which targets of a batch are scored; layers subclass it to add their bucketing.

    Plans are made on the host. Tensors are copied to the device with the batch. Numbers stay on the host, so that
    sizing a slice needs no synchronization.
    """

    num_scored: int
    rows_N: Tensor | None
    """Flat positions of the scored targets; None if all are scored."""
    ngrams: NgramPlan | None
    """Positions of n-gram weights, in models with `model.maxent`."""

    @classmethod
    def of(cls, targets: Tensor, **more: Any) -> Self:
        """The plan of some targets; `more` are the fields of the subclass."""
        flat = targets.flatten()
        rows = (flat != IGNORE_INDEX).nonzero().squeeze(1)
        return cls(len(rows), None if len(rows) == len(flat) else rows, None, **more)

    @property
    def scale(self) -> float:
        """Factor that turns a sum over the scored tokens into their mean."""
        return 1 / max(1, self.num_scored)

    def scored(self, tensor: Tensor) -> Tensor:
        """The scored rows of a flattened tensor."""
        return tensor if self.rows_N is None else tensor.index_select(0, self.rows_N)

    def spread(self, values_N: Tensor, shape: torch.Size) -> Tensor:
        """Values of the scored tokens in the shape of the targets, 0 for the others."""
        if self.rows_N is not None:
            values_N = values_N.new_zeros(shape.numel()).index_copy_(0, self.rows_N, values_N)
        return values_N.view(shape)

    def to(self, device: torch.device) -> Self:
        """A copy on a device."""
        plan: Self = to_device(self, device)
        return plan


class OutputLayer(nn.Module, ABC):
    """p(word | hidden) over a vocabulary whose ids are sorted by decreasing count."""

    self_normalized = False
    """Whether scores are trained to be log-probabilities without a normalizer; enables `unnormalized_nll`."""

    def __init__(self, *, width: int, vocab_size: int) -> None:
        super().__init__()
        self.width, self.vocab_size = width, vocab_size
        self.cutoffs: list[int] = []
        """Word ids at which tails begin, for layers that cut their vocabulary by frequency."""

    @classmethod
    def build(cls, settings: Any, sizes: LayerSizes) -> OutputLayer:  # noqa: ARG003
        """The layer described by the settings; override it in layers that have settings."""
        return cls(width=sizes.width, vocab_size=len(sizes.counts))

    @classmethod
    def word_classes(cls, settings: Any, corpus: Corpus) -> NDArray[Any] | None:  # noqa: ARG003
        """The class of each word, for layers that learn classes from the training text."""
        return None

    def word_vectors(self) -> list[Tensor]:
        """Word vectors by cluster, for inputs that share them; rows beyond the words belong to the layer."""
        raise NotImplementedError(f"{type(self).__name__} shares no word vectors")

    def rows_by_word(self) -> list[tuple[Tensor, list[int]]] | None:
        """Parameters that have a row per word, with the word ids of their rows (negative for rows of no word).

        Weights are mapped to another vocabulary by these rows. None if other weights depend on the words.
        """
        return None

    @abstractmethod
    def plan(self, targets: Tensor, *, generator: torch.Generator | None = None) -> Plan:
        """Bucketing of a batch, computed on the host from host targets; raises UserError for ids out of range.

        `generator` is seeded by (seed, step). Layers that draw samples must draw all of them from it.
        """

    def plans(
        self, targets_TB: Tensor, groups: Sequence[slice], *, generator: torch.Generator | None = None
    ) -> tuple[Plan, ...]:
        """A plan for each micro-batch, given as the slices of its streams.

        `targets_TB` is the batch of all ranks; the groups are those of one rank. A layer that reads some rows of its
        weights (samples) must choose the rows for the whole batch and return the same tensor of rows in all plans.
        """
        return tuple(self.plan(targets_TB[:, group], generator=generator) for group in groups)

    @abstractmethod
    def loss(
        self, hidden: Tensor, targets: Tensor, plan: Plan | None = None, ngrams: Sequence[NgramScores] = ()
    ) -> Tensor:
        """The training objective, mean over scored tokens (0 if there are none).

        Every parameter gets a gradient, zeros if its cluster is empty. Without a plan, one is made, which may
        synchronize with the device. `ngrams` are added to the logits of the softmaxes of `softmax_rows`.
        """

    @abstractmethod
    def nll(self, hidden: Tensor, targets: Tensor, contexts: NgramContexts | None = None) -> Tensor:
        """Exact -log p(target | hidden) per token under the normalized model, 0 if ignored; shaped as targets.

        For evaluation: it carries no gradient. `contexts` are those of the n-gram weights, if there are any.
        """

    @abstractmethod
    def log_prob(self, hidden: Tensor, contexts: NgramContexts | None = None) -> Tensor:
        """The exact log-distribution over the whole vocabulary, (..., V)."""

    # ---- layers whose settings have `supports_maxent` ----

    def softmax_sizes(self) -> list[int]:
        """Number of entries of each softmax; n-gram weights identify a softmax by its index in this list."""
        return [self.vocab_size]

    def softmax_rows(self, plan: Plan) -> list[SoftmaxRows]:
        """The tokens scored by each call of the fused loss, and the softmax that scores each token."""
        raise NotImplementedError(f"{type(self).__name__} supports no n-gram weights")

    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k likeliest words: (log-probabilities, ids), both (..., k), likeliest first, exact."""
        best = self.log_prob(hidden).topk(k)
        return best.values, best.indices

    def draw(self, hidden_ND: Tensor, uniform_N: Tensor, *, exclude_id: int | None = None) -> Tensor:
        """One word id per row, drawn from the distribution without `exclude_id`.

        `uniform_N`, a number in [0, 1) per row, decides the draw. Layers with clusters draw the cluster first.
        """
        log_prob_NV = self.log_prob(hidden_ND)
        if exclude_id is not None:
            log_prob_NV[:, exclude_id] = -torch.inf
        return inverse_cdf(log_prob_NV.softmax(-1), uniform_N)[0]

    def reset_parameters(self) -> None:
        """Weights U(+-1/sqrt(fan in)) in the order of the parameters, biases 0."""
        for parameter in self.parameters():
            if parameter.dim() == 1:
                nn.init.zeros_(parameter)
            else:
                bound = parameter.size(1) ** -0.5
                nn.init.uniform_(parameter, -bound, bound)

    def describe(self, counts: NDArray[Any] | None = None) -> Description:  # noqa: ARG002
        """Parameters and structure as plain values; with `counts`, also each cluster's share of the tokens."""
        return {
            "layer": type(self).__name__,
            "vocabulary": self.vocab_size,
            "parameters": sum(p.numel() for p in self.parameters()),
        }

    def check_range(self, targets: Tensor) -> None:
        """Reject targets outside the vocabulary; called on the host only."""
        assert targets.device.type == "cpu", "targets are checked on the host"
        wrong = targets[(targets != IGNORE_INDEX) & ((targets < 0) | (targets >= self.vocab_size))]
        if wrong.numel():
            raise UserError(
                f"Target word ids must be below the vocabulary size ({self.vocab_size}), or {IGNORE_INDEX} for tokens "
                f"that are not scored; got {int(wrong[0])}."
            )


def describe_clusters(sizes: Sequence[int], widths: Sequence[int], counts: NDArray[Any] | None) -> Description:
    """The clusters' part of `OutputLayer.describe`."""
    clusters: Description = {"sizes": list(sizes), "widths": list(widths)}
    if counts is not None:
        totals = np.add.reduceat(counts.astype(np.float64), np.cumsum([0, *sizes[:-1]]))
        clusters["coverage"] = (totals / max(totals.sum(), 1)).tolist()
    return clusters


def inverse_cdf(probs_NK: Tensor, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    """The entry at which each row's cumulative distribution passes `uniform`, and the position inside that entry.

    The position is uniform in [0, 1] again. Rows need not sum to one. Entries of probability zero are never drawn.
    """
    probs_NK = probs_NK.double()  # sums over a large vocabulary need doubles
    cumulative_NK = probs_NK.cumsum(-1)
    total_N1 = cumulative_NK[:, -1:]
    # Rounding must not reach the total, behind which there are only entries of probability zero.
    reached_N1 = torch.minimum(uniform_N[:, None] * total_N1, total_N1.nextafter(torch.zeros_like(total_N1)))
    entry_N1 = torch.searchsorted(cumulative_NK, reached_N1, right=True)
    inside_N1 = probs_NK.gather(1, entry_N1)
    rest_N1 = (reached_N1 - (cumulative_NK.gather(1, entry_N1) - inside_N1)) / inside_N1
    return entry_N1.squeeze(1), rest_N1.squeeze(1).clamp(0, 1)


def flatten(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states (N, D) and targets (N), whose leading shapes must agree."""
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets must have the shape of hidden without its last dimension, {tuple(hidden.shape[:-1])}; got "
            f"{tuple(targets.shape)}"
        )
    return hidden.flatten(0, -2), targets.flatten()


def build_output(
    config: OutputConfig, *, width: int, counts: NDArray[Any], classes: NDArray[Any] | None = None
) -> OutputLayer:
    """The layer that `output=NAME` names, over a vocabulary with these training counts, in decreasing order."""
    kind: type[OutputLayer] = find_plugin("output", config.name).target
    return kind.build(config, LayerSizes(width, counts, classes))
