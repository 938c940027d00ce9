"""The contract of output layers.

An output layer turns hidden states into a distribution over the vocabulary, p(word | hidden), and into a training
loss. Training, evaluation and generation use a layer only through this contract, so a new layer edits no other file.

Shapes: N tokens (any leading shape is accepted and flattened), D width of the hidden state, V words.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lm.config.groups import OutputConfig
from lm.config.registry import find_plugin
from lm.data.batches import to_device
from lm.output.drawing import check_sampling, entry_at
from lm.output.maxent import NgramContexts, NgramPlan, NgramScores, SoftmaxRows
from lm.system.errors import UserError

if TYPE_CHECKING:
    from lm.data.corpus import Corpus

IGNORE_INDEX = -100
"""Targets with this value are not scored: padding, and the unscored warm-up of an evaluation piece."""

COLD = 1e-6
"""Below this temperature the likeliest word is certain, within the resolution of log-probabilities."""

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

    def __init__(self, *, width: int, vocab_size: int, fused: bool = True) -> None:
        super().__init__()
        self.width, self.vocab_size, self.fused = width, vocab_size, fused
        self.cutoffs: list[int] = []
        """Word ids at which tails begin, for layers that cut their vocabulary by frequency."""

    @classmethod
    @abstractmethod
    def build(cls, settings: Any, sizes: LayerSizes) -> OutputLayer:
        """The layer described by the settings."""

    @classmethod
    def word_classes(
        cls,
        settings: Any,  # noqa: ARG003
        corpus: Corpus,  # noqa: ARG003
        *,
        notice: Callable[[str], None],  # noqa: ARG003
    ) -> NDArray[Any] | None:
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
        self.check_k(k)
        best = self.log_prob(hidden).topk(k)
        return best.values, best.indices

    @torch.no_grad()
    def sample(
        self,
        hidden: Tensor,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        without: int | None = None,
        uniform: Tensor | None = None,
    ) -> Tensor:
        """One word id per hidden state, drawn from the (tempered, truncated) distribution.

        `without` is a word that is never drawn, as if its probability were zero before all else. `uniform`, a number
        in [0, 1) per hidden state, decides the draws: the same number draws the same word in any batch.

        The full distribution is built only where it is needed: a temperature changes the mass of every word, so
        without `top_k` all of them are.
        """
        check_sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        hidden_ND = hidden.flatten(0, -2)
        if temperature < COLD:
            return self._best(hidden_ND, 1, without=without)[1].view(hidden.shape[:-1])
        if uniform is None:
            uniform = torch.rand(len(hidden_ND), dtype=torch.float64, device=hidden.device)
        uniform_N, top_p = uniform.flatten(), None if top_p == 1 else top_p
        if top_k is None and top_p is None:
            word_N = self.draw_word(hidden_ND, uniform_N, temperature=temperature, without=without)
            return word_N.view(hidden.shape[:-1])
        if top_k is not None:
            scores_Nk, ids_Nk = self._best(hidden_ND, top_k, without=without)
            scores_Nk = (scores_Nk / temperature).log_softmax(-1)
        else:
            assert top_p is not None
            scores_Nk, ids_Nk = self._holding(hidden_ND, top_p, temperature=temperature, without=without)
        if top_p is not None:
            before_Nk = scores_Nk.exp().cumsum(-1) - scores_Nk.exp()
            scores_Nk = scores_Nk.masked_fill(before_Nk >= top_p, -torch.inf)
        entry_N, _ = entry_at(scores_Nk.softmax(-1), uniform_N)
        return ids_Nk.gather(-1, entry_N[:, None]).view(hidden.shape[:-1])

    def draw_word(
        self, hidden_ND: Tensor, uniform_N: Tensor, *, temperature: float = 1.0, without: int | None = None
    ) -> Tensor:
        """One word per row from all words; layers with clusters draw the cluster first where they can."""
        return entry_at(self._scores(hidden_ND, temperature, without=without).softmax(-1), uniform_N)[0]

    def _scores(self, hidden_ND: Tensor, temperature: float, *, without: int | None) -> Tensor:
        """Tempered log-probabilities of all words, not normalised."""
        scores_NV = self.log_prob(hidden_ND) / temperature
        if without is not None:
            scores_NV[:, without] = -torch.inf
        return scores_NV

    def _best(self, hidden_ND: Tensor, k: int, *, without: int | None) -> tuple[Tensor, Tensor]:
        """The k likeliest words, or as many as there are, after one word is left out: (log-probabilities, ids)."""
        if without is None:
            return self.topk(hidden_ND, min(k, self.vocab_size))
        scores_Nk, ids_Nk = self.topk(hidden_ND, min(k + 1, self.vocab_size))
        best = scores_Nk.masked_fill(ids_Nk == without, -torch.inf).topk(min(k, self.vocab_size))
        return best.values, ids_Nk.gather(-1, best.indices)

    def _holding(
        self, hidden_ND: Tensor, mass: float, *, temperature: float, without: int | None
    ) -> tuple[Tensor, Tensor]:
        """Enough of the likeliest words to hold `mass` in every row: (tempered log-probabilities, ids)."""
        log_total_N: Tensor | float = 0.0
        if temperature != 1:
            log_total_N = self._scores(hidden_ND, temperature, without=without).logsumexp(-1, keepdim=True)
        elif without is not None:
            nll_N = self.nll(hidden_ND, torch.full(hidden_ND.shape[:1], without, device=hidden_ND.device))
            # Where the word left out is all but certain, what the others share is not known more exactly than this.
            log_total_N = nll_N.clamp(min=1e-6).neg().expm1().neg().log()[:, None]
        keep = min(64, self.vocab_size)
        while True:
            scores_Nk, ids_Nk = self._best(hidden_ND, keep, without=without)
            scores_Nk = scores_Nk / temperature - log_total_N
            if keep == self.vocab_size or bool((scores_Nk.exp().sum(-1) >= mass).all()):
                return scores_Nk, ids_Nk
            keep = min(8 * keep, self.vocab_size)

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

    def check_k(self, k: int) -> None:
        if not 1 <= k <= self.vocab_size:
            raise UserError(f"k must be from 1 to the vocabulary size ({self.vocab_size}); got {k}.")


def describe_clusters(sizes: Sequence[int], widths: Sequence[int], counts: NDArray[Any] | None) -> Description:
    """The clusters' part of `OutputLayer.describe`."""
    clusters: Description = {"sizes": list(sizes), "widths": list(widths)}
    if counts is not None:
        totals = np.add.reduceat(counts.astype(np.float64), np.cumsum([0, *sizes[:-1]]))
        clusters["coverage"] = (totals / max(totals.sum(), 1)).tolist()
    return clusters


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
    """The layer that `output=NAME` names, over a vocabulary with these training counts."""
    counts = np.asarray(counts)
    if counts.ndim != 1 or not len(counts) or (counts < 0).any() or (np.diff(counts.astype(np.float64)) > 0).any():
        raise UserError(
            "Counts must be one or more non-negative numbers in decreasing order, because word ids are sorted by "
            f"count; got {np.array2string(counts.ravel(), threshold=6, edgeitems=3)}."
        )
    kind: type[OutputLayer] = find_plugin("output", config.name).target
    return kind.build(config, LayerSizes(width, counts, classes))
