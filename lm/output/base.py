"""The contract that every output layer keeps.

An output layer turns hidden states into a distribution over the vocabulary, p(word | hidden), and into a training
loss. Training, evaluation and generation use a layer through this contract alone, so a new layer edits no
other file.

Shapes: N tokens (any leading shape is accepted and flattened), D width of the hidden state, V words.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lm.config.groups import OutputConfig
from lm.config.registry import find_plugin
from lm.data.batches import Plan
from lm.output.drawing import check_sampling, entry_at
from lm.output.logits import SoftmaxInPlace, softmax_in_place
from lm.output.maxent import MaxEnt, NgramScores, Slices, TouchedRows
from lm.system.errors import UserError

if TYPE_CHECKING:
    from lm.data.corpus import Corpus
    from lm.output.clusters.choice import ClusterChoice

IGNORE_INDEX = -100
"""Targets with this value are not scored: padding, and the unscored warm-up of an evaluation piece."""

COLD = 1e-6
"""Below this temperature the likeliest word is certain, within the resolution of log-probabilities."""

Description = dict[str, Any]
"""Plain values that say what a layer is made of."""


class LayerSizes(NamedTuple):
    """What a layer is built for."""

    width: int
    """Of the hidden states."""
    counts: NDArray[Any]
    """How often training holds each word, in decreasing order."""
    classes: NDArray[Any] | None = None
    """What `word_classes` returned; without them a layer can be built to load trained weights into."""


class SoftmaxSize(NamedTuple):
    """One softmax of a layer: the tokens it scores, its words and its weights."""

    tokens: int
    words: int
    weights: int


class OutputLayer(nn.Module, ABC):
    """p(word | hidden) over a vocabulary whose ids are sorted by decreasing count."""

    self_normalized = False
    """Whether scores are trained to be log-probabilities as they are; then `unnormalized_nll` makes sense."""

    def __init__(self, *, width: int, vocab_size: int) -> None:
        super().__init__()
        self.width = width
        self.vocab_size = vocab_size
        self.cutoffs: list[int] = []
        """Word ids at which clusters begin, where the layer cuts its vocabulary by frequency."""
        self.counts: NDArray[Any] | None = None
        """Training count of each word, where known; only `describe` looks at it."""
        self.softmax_in_place: SoftmaxInPlace = softmax_in_place
        """How the fused loss goes through its logits."""
        self.choice: ClusterChoice | None = None
        """How the cutoffs were chosen, where they were chosen automatically; for `describe` too."""
        self.maxent: MaxEnt | None = None
        """The n-gram weights of `model.maxent`, in layers whose settings say that they take them."""

    @classmethod
    @abstractmethod
    def build(cls, settings: Any, sizes: LayerSizes) -> OutputLayer:
        """The layer of these settings."""

    @classmethod
    def word_classes(
        cls,
        settings: Any,  # noqa: ARG003
        corpus: Corpus,  # noqa: ARG003
        *,
        notice: Callable[[str], None],  # noqa: ARG003
    ) -> NDArray[Any] | None:
        """The class of each word, where the layer learns classes from the training text."""
        return None

    def word_vectors(self) -> list[Tensor]:
        """The vectors of the words by cluster, where an input can share them; rows beyond the words are the layer's."""
        raise NotImplementedError(f"{type(self).__name__} shares no word vectors")

    def rows_by_word(self) -> list[tuple[Tensor, list[int]]] | None:
        """Parameters that have a row per word, and the words of their rows (other rows by negative numbers).

        By these, weights move to another vocabulary; None where a layer's other weights depend on its words, too.
        """
        return None

    def softmaxes(self, num_tokens: int, num_targets: int) -> list[SoftmaxSize]:  # noqa: ARG002
        """Every softmax of a step over `num_tokens` tokens, for the memory estimate."""
        ngrams = 0 if self.maxent is None else self.maxent.table.weight.numel()
        return [SoftmaxSize(num_tokens, self.vocab_size, sum(p.numel() for p in self.parameters()) - ngrams)]

    def gathered(self, num_targets: int) -> int:
        """Numbers in rows that a training step copies out of the weights, and in their gradients."""
        if self.maxent is None:
            return 0
        # The rows, the gradient that each loss keeps for the backward pass, and their sum. Or what the optimizer holds:
        # six copies, when the logits and activations are gone; five beside these come closest to the real peak.
        copies = max(5, 2 + self.num_losses())
        return copies * self.maxent.touched(num_targets, per_context=self.scores_per_token())

    def num_losses(self) -> int:
        """Calls of `softmax_loss` in a step; for layers with n-gram weights."""
        return 1

    def scores_per_token(self) -> float:
        """Entries of all softmaxes that score a token in training, on average; for layers with n-gram weights."""
        return self.vocab_size

    @abstractmethod
    def plan(self, targets: Tensor, *, generator: torch.Generator | None = None) -> Plan:
        """Whatever bucketing the layer needs, made on the host from host targets; refuses ids out of range.

        `generator` is seeded by (seed, step); layers that draw samples draw them from it and from nowhere else.
        """

    def plans(
        self,
        targets_TB: Tensor,
        groups: Sequence[slice],
        *,
        generator: torch.Generator | None = None,
        words_PB: Tensor | None = None,
    ) -> tuple[Plan, ...]:
        """A plan for each group of streams, where a step adds up the gradients of several.

        `targets_TB` is the whole batch, the groups are those of one rank. A layer that reads some rows of its weights,
        as those that draw samples do, must choose them for the whole batch and hand out the same rows to all.
        `words_PB` are what the streams read, from `look_back` words before the batch on; only n-grams need them.
        """
        plans = tuple(self.plan(targets_TB[:, group], generator=generator) for group in groups)
        if self.maxent is None:
            return plans
        assert words_PB is not None, "n-gram weights need the words that were read"
        context_TBO = self.maxent.contexts(words_PB)
        touched = TouchedRows(self.ngram_slices(self.plan(targets_TB), context_TBO).values())
        parts = zip(plans, groups, strict=True)
        return tuple(self.with_ngrams(plan, context_TBO[:, group], touched=touched) for plan, group in parts)

    # ---- n-gram weights, see `maxent.py` ----

    @property
    def look_back(self) -> int | None:
        """How many words before a batch its n-grams reach back; None without n-gram weights."""
        return None if self.maxent is None else self.maxent.order - 1

    def ngram_slices(self, plan: Plan, contexts: Tensor) -> dict[str, Slices]:
        """Where the n-gram weights of each softmax of a plan are, on the host, after contexts (..., O)."""
        raise NotImplementedError(f"{type(self).__name__} takes no n-gram weights")

    def with_ngrams(self, plan: Plan, contexts: Tensor, *, touched: TouchedRows | None = None) -> Plan:
        """The plan with the places of its n-gram weights: among the rows that a step touches, or among all."""
        tensors = {} if touched is None else {"ngram_rows": touched.rows_U}
        for name, slices in self.ngram_slices(plan, contexts).items():
            tensors[f"ngrams_{name}"] = slices.start_NO if touched is None else touched.place(slices.start_NO)
        return Plan(plan.tensors | tensors, plan.counts)

    def ngrams(self, plan: Plan, name: str) -> NgramScores | None:
        """What n-grams add to the logits of the softmax of that name."""
        if self.maxent is None:
            return None
        return NgramScores(self.maxent.weights(plan.tensors.get("ngram_rows")), plan.tensors[f"ngrams_{name}"])

    @abstractmethod
    def loss(self, hidden: Tensor, targets: Tensor, plan: Plan | None = None) -> Tensor:
        """The training objective, mean over scored tokens (0 if there are none).

        Every parameter gets a gradient, zeros where a cluster was empty. Without a plan one is made, which may
        synchronise with the device.
        """

    @abstractmethod
    def nll(self, hidden: Tensor, targets: Tensor, contexts: Tensor | None = None) -> Tensor:
        """Exact -log p(target | hidden) per token under the normalised model, 0 where ignored; shaped as targets.

        For evaluation: it carries no gradient. `contexts` (..., O) are those of the n-gram weights, if there are any.
        """

    @abstractmethod
    def log_prob(self, hidden: Tensor, contexts: Tensor | None = None) -> Tensor:
        """The exact log-distribution over the whole vocabulary, (..., V)."""

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

    def describe(self) -> Description:
        """Parameters and structure as plain values, for the log and for comparisons."""
        return {
            "layer": type(self).__name__,
            "vocabulary": self.vocab_size,
            "parameters": sum(p.numel() for p in self.parameters()),
            **({"predicted": self.choice.as_dict()} if self.choice is not None else {}),
        }

    def describe_clusters(self, sizes: Sequence[int], *, widths: Sequence[int]) -> Description:
        """The clusters' part of `describe`, with their shares of the training tokens where the counts are known."""
        clusters: Description = {"sizes": list(sizes), "widths": list(widths)}
        if self.counts is not None:
            totals = np.add.reduceat(self.counts.astype(np.float64), np.cumsum([0, *sizes[:-1]]))
            clusters["coverage"] = (totals / max(totals.sum(), 1)).tolist()
        return clusters

    def check_range(self, targets: Tensor) -> None:
        """Refuse targets outside the vocabulary; called on the host only."""
        assert targets.device.type == "cpu", "targets are checked on the host"
        wrong = targets[(targets != IGNORE_INDEX) & ((targets < 0) | (targets >= self.vocab_size))]
        if wrong.numel():
            raise UserError(
                f"target word id {int(wrong[0])} is outside the vocabulary (0 to {self.vocab_size - 1}); "
                f"use {IGNORE_INDEX} for positions that are not to be scored."
            )

    def check_k(self, k: int) -> None:
        if not 1 <= k <= self.vocab_size:
            raise UserError(f"k must be from 1 to the vocabulary's size ({self.vocab_size}); got {k}.")


def plan_scored(targets: Tensor) -> Plan:
    """Which positions are scored, where it is not all of them."""
    flat = targets.flatten()
    rows = (flat != IGNORE_INDEX).nonzero().squeeze(1)
    return Plan({} if len(rows) == len(flat) else {"rows": rows}, (len(rows),))


def scored(hidden: Tensor, targets: Tensor, *, plan: Plan) -> tuple[Tensor, Tensor]:
    """The hidden states and targets that count, flattened."""
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets must have the shape of hidden without its last dimension, {tuple(hidden.shape[:-1])}; got "
            f"{tuple(targets.shape)}"
        )
    hidden_ND, target_N = hidden.flatten(0, -2), targets.flatten()
    if "rows" not in plan.tensors:
        return hidden_ND, target_N
    return hidden_ND.index_select(0, plan.tensors["rows"]), target_N.index_select(0, plan.tensors["rows"])


def build_output(
    config: OutputConfig,
    *,
    width: int,
    counts: NDArray[Any],
    vocab_size: int | None = None,
    classes: NDArray[Any] | None = None,
) -> OutputLayer:
    """The layer that `output=NAME` names, over a vocabulary with these training counts."""
    counts = _check_counts(counts, vocab_size=vocab_size)
    kind: type[OutputLayer] = find_plugin("output", config.name).target
    layer = kind.build(config, LayerSizes(width, counts, classes))
    layer.counts = counts
    return layer


def _check_counts(counts: NDArray[Any], *, vocab_size: int | None) -> NDArray[Any]:
    counts = np.asarray(counts)
    if vocab_size is not None and len(counts) != vocab_size:
        raise UserError(
            f"the counts must hold one number for each of the {vocab_size} words of the vocabulary; got {len(counts)}."
        )
    if counts.ndim != 1 or not len(counts) or (counts < 0).any() or (np.diff(counts.astype(np.float64)) > 0).any():
        raise UserError(
            "the counts must be one or more non-negative numbers in decreasing order, as word ids are sorted by "
            f"count; got {np.array2string(counts.ravel(), threshold=6, edgeitems=3)}."
        )
    return counts
