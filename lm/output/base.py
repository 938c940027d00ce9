"""The interface of output layers.

An output layer turns hidden states into a distribution over the vocabulary, p(word | hidden), and into a training
loss. Training, evaluation and generation only use this interface, so adding a layer changes no other file.

Shapes: N tokens (any leading shape is accepted and flattened), D width of the hidden state, V words.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lm.config.groups import OutputConfig, find_plugin, settings_of
from lm.data.batches import IGNORE_INDEX as IGNORE_INDEX
from lm.data.batches import to_device
from lm.output.maxent import NgramContexts, NgramPlan, NgramScores, SoftmaxRows
from lm.system.errors import UserError

if TYPE_CHECKING:
    from lm.data.corpus import Corpus

Description = dict[str, Any]
"""A layer's structure as plain Python values."""


class LayerSizes(NamedTuple):
    """Vocabulary and hidden width to build a layer for."""

    width: int
    """Width of the hidden states."""
    counts: NDArray[Any]
    """Training count of each word, in decreasing order."""
    classes: NDArray[Any] | None = None
    """Result of `OutputLayer.word_classes`; can be omitted when the layer's trained weights are loaded afterwards."""
    sparse: bool = True
    """Whether sampled rows get their gradients through a `SparseTable`, for the optimizers in `lm.optim`."""


@dataclass(frozen=True)
class Plan:
    """Scored targets of a batch; layers subclass it to add their bucketing.

    Plans are made on the host. Their tensors are copied to the device with the batch. Their Python numbers stay on the
    host, so sizing a slice needs no synchronization.
    """

    num_scored: int
    rows_N: Tensor | None
    """Flat positions of the scored targets; None if all are scored."""
    ngrams: NgramPlan | None
    """Positions of n-gram weights, in models with `model.maxent`."""

    @classmethod
    def of(cls, targets: Tensor, **more: Any) -> Self:
        """Build a plan from targets; `more` holds the subclass's fields."""
        flat = targets.flatten()
        rows = (flat != IGNORE_INDEX).nonzero().squeeze(1)
        return cls(len(rows), None if len(rows) == len(flat) else rows, None, **more)

    @property
    def scale(self) -> float:
        """Factor that turns a sum over scored tokens into a mean."""
        return 1 / max(1, self.num_scored)

    def scored(self, tensor: Tensor) -> Tensor:
        """Return the scored rows of a flattened tensor."""
        return tensor if self.rows_N is None else tensor.index_select(0, self.rows_N)

    def spread(self, values_N: Tensor, shape: torch.Size) -> Tensor:
        """Scatter values of scored tokens into the targets' shape, with 0 elsewhere."""
        if self.rows_N is not None:
            values_N = values_N.new_zeros(shape.numel()).index_copy_(0, self.rows_N, values_N)
        return values_N.view(shape)

    def to(self, device: torch.device) -> Self:
        """Return a copy on `device`."""
        plan: Self = to_device(self, device)
        return plan


class OutputLayer(nn.Module, ABC):
    """p(word | hidden) over a vocabulary whose ids are sorted by decreasing count."""

    self_normalized = False
    """Whether raw scores are trained to approximate log-probabilities; enables `unnormalized_nll`."""

    def __init__(self, *, width: int, vocab_size: int) -> None:
        super().__init__()
        self.width, self.vocab_size = width, vocab_size
        self.cutoffs: list[int] = []
        """Word ids at which tails begin, in layers that split the vocabulary by frequency."""

    @classmethod
    def build(cls, settings: Any, sizes: LayerSizes) -> OutputLayer:
        """Build the layer from its settings; layers with settings override this."""
        return cls(width=sizes.width, vocab_size=len(sizes.counts))

    @classmethod
    def from_counts(
        cls, counts: NDArray[Any], *, width: int, classes: NDArray[Any] | None = None, **settings: Any
    ) -> Self:
        """Build a layer for any PyTorch model from word counts in decreasing order.

        `settings` are those of `output=NAME` (docs/settings.md). Automatic cutoffs minimize the number of operations.

        >>> AdaptiveSoftmax.from_counts(counts, width=512, head_coverage=0.7)
        """
        counts = np.asarray(counts)
        if not len(counts) or (np.diff(counts) > 0).any():
            raise UserError("counts must hold each word's count in decreasing order. Try numbering words by frequency.")
        name, schema = settings_of(cls)
        config = schema(name=name, **settings)
        if getattr(config, "cutoffs", None) == "auto":
            from lm.output.clusters.choice import counted_cutoffs

            config = replace(config, cutoffs=counted_cutoffs(config, counts=counts, width=width))
        return cast(Self, cls.build(config, LayerSizes(width, counts, classes, sparse=False)))

    @classmethod
    def word_classes(cls, settings: Any, corpus: Corpus) -> NDArray[Any] | None:
        """Return each word's class, in layers that learn classes from the training text."""
        return None

    def word_vectors(self) -> list[Tensor]:
        """Word vectors by cluster, for tied input embeddings; extra rows at the end are internal to the layer."""
        raise NotImplementedError(f"{type(self).__name__} shares no word vectors")

    def rows_by_word(self) -> list[tuple[Tensor, list[int]]] | None:
        """Parameters with one row per word, each with its rows' word ids (negative for rows without a word).

        Used to map weights to another vocabulary. None if other weights also depend on the words.
        """
        return None

    @abstractmethod
    def plan(self, targets: Tensor, *, generator: torch.Generator | None = None) -> Plan:
        """Bucket a batch on the host from host targets; raises UserError for ids out of range.

        `generator` is seeded by (seed, step). Layers that sample must use it for all of their draws.
        """

    def plans(
        self, targets_TB: Tensor, groups: Sequence[slice], *, generator: torch.Generator | None = None
    ) -> tuple[Plan, ...]:
        """Make one plan per micro-batch; `groups` holds the stream slice of each.

        `targets_TB` is the batch of all ranks; `groups` are those of one rank. A layer that reads only some weight rows
        (samples) must choose them for the whole batch and return the same row tensor in all plans.
        """
        return tuple(self.plan(targets_TB[:, group], generator=generator) for group in groups)

    @abstractmethod
    def loss(
        self, hidden: Tensor, targets: Tensor, plan: Plan | None = None, ngrams: Sequence[NgramScores] = ()
    ) -> Tensor:
        """Training loss, averaged over scored tokens (0 if there are none).

        Every parameter gets a gradient, zeros if its cluster is empty. If `plan` is None, one is made, which may
        synchronize with the device. `ngrams` are added to the logits, one entry per item of `softmax_rows`.
        """

    @abstractmethod
    def nll(self, hidden: Tensor, targets: Tensor, contexts: NgramContexts | None = None) -> Tensor:
        """Exact -log p(target | hidden) per token under the normalized model, 0 if ignored; same shape as targets.

        For evaluation only: it carries no gradient. `contexts` are the n-gram histories, in models with `model.maxent`.
        """

    @abstractmethod
    def log_prob(self, hidden: Tensor, contexts: NgramContexts | None = None) -> Tensor:
        """Exact log-probabilities over the whole vocabulary, (..., V)."""

    def predict(self, hidden: Tensor) -> Tensor:
        """Return the most likely word, (...)."""
        return self.topk(hidden, 1)[1].squeeze(-1)

    # ---- layers whose settings have `supports_maxent` ----

    def softmax_sizes(self) -> list[int]:
        """Number of entries in each softmax; n-gram weights refer to a softmax by its index in this list."""
        return [self.vocab_size]

    def softmax_rows(self, plan: Plan) -> list[SoftmaxRows]:
        """Return the tokens scored by each fused-loss call, and the softmax that scores each token."""
        raise NotImplementedError(f"{type(self).__name__} supports no n-gram weights")

    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k most likely words, exact and sorted: (log-probabilities, ids), both (..., k)."""
        best = self.log_prob(hidden).topk(k)
        return best.values, best.indices

    def draw(self, hidden_ND: Tensor, uniform_N: Tensor, *, exclude_id: int | None = None) -> Tensor:
        """Sample one word id per row, excluding `exclude_id`.

        `uniform_N` holds one uniform number in [0, 1) per row. Layers with clusters sample the cluster first.
        """
        log_prob_NV = self.log_prob(hidden_ND)
        if exclude_id is not None:
            log_prob_NV[:, exclude_id] = -torch.inf
        return inverse_cdf(log_prob_NV.softmax(-1), uniform_N)[0]

    def reset_parameters(self) -> None:
        """Initialize weights to U(+-1/sqrt(fan_in)), in parameter order, and biases to 0."""
        for parameter in self.parameters():
            if parameter.dim() == 1:
                nn.init.zeros_(parameter)
            else:
                bound = parameter.size(1) ** -0.5
                nn.init.uniform_(parameter, -bound, bound)

    def describe(self, counts: NDArray[Any] | None = None) -> Description:
        """Structure and parameter count as plain values; with `counts`, also each cluster's share of tokens."""
        return {
            "layer": type(self).__name__,
            "vocabulary": self.vocab_size,
            "parameters": sum(p.numel() for p in self.parameters()),
        }

    def check_range(self, targets: Tensor) -> None:
        """Raise UserError for targets outside the vocabulary; host tensors only."""
        assert targets.device.type == "cpu", "targets are checked on the host"
        wrong = targets[(targets != IGNORE_INDEX) & ((targets < 0) | (targets >= self.vocab_size))]
        if wrong.numel():
            raise UserError(
                f"Target word ids must be below the vocabulary size ({self.vocab_size}), or {IGNORE_INDEX} for tokens "
                f"that are not scored; got {int(wrong[0])}."
            )


def describe_clusters(sizes: Sequence[int], widths: Sequence[int], counts: NDArray[Any] | None) -> Description:
    """Cluster fields for `OutputLayer.describe`."""
    clusters: Description = {"sizes": list(sizes), "widths": list(widths)}
    if counts is not None:
        totals = np.add.reduceat(counts.astype(np.float64), np.cumsum([0, *sizes[:-1]]))
        clusters["coverage"] = (totals / max(totals.sum(), 1)).tolist()
    return clusters


def inverse_cdf(probs_NK: Tensor, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entry where each row's cumulative distribution passes `uniform`, and the position within that entry.

    The position is again uniform in [0, 1]. Rows need not sum to one. Entries with zero probability are never drawn.
    """
    probs_NK = probs_NK.double()  # sums over a large vocabulary need float64
    cumulative_NK = probs_NK.cumsum(-1)
    total_N1 = cumulative_NK[:, -1:]
    # Rounding must not reach the total: only zero-probability entries lie beyond it.
    reached_N1 = torch.minimum(uniform_N[:, None] * total_N1, total_N1.nextafter(torch.zeros_like(total_N1)))
    entry_N1 = torch.searchsorted(cumulative_NK, reached_N1, right=True)
    inside_N1 = probs_NK.gather(1, entry_N1)
    rest_N1 = (reached_N1 - (cumulative_NK.gather(1, entry_N1) - inside_N1)) / inside_N1
    return entry_N1.squeeze(1), rest_N1.squeeze(1).clamp(0, 1)


def flatten(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Flatten hidden states to (N, D) and targets to (N); their leading shapes must match."""
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets must have the shape of hidden without its last dimension, {tuple(hidden.shape[:-1])}; got "
            f"{tuple(targets.shape)}"
        )
    return as_rows(hidden), targets.flatten()


def as_rows(hidden: Tensor) -> Tensor:
    """Flatten hidden states of any leading shape, even none, to (N, D)."""
    return hidden.reshape(-1, hidden.size(-1))


def build_output(
    config: OutputConfig, *, width: int, counts: NDArray[Any], classes: NDArray[Any] | None = None
) -> OutputLayer:
    """Build the layer selected by `output=NAME`; `counts` are the training counts in decreasing order."""
    kind: type[OutputLayer] = find_plugin("output", config.name).target
    return kind.build(config, LayerSizes(width, counts, classes))
