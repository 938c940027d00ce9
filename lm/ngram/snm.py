"""Sparse non-negative matrix language models (Shazeer, Pelemans and Chelba, 2014), with held-out training (2015).

A context has features: its n-grams and its skip-grams. Each adds a row of non-negative weights to the words' scores:

    P(w | context) = sum_i M_iw / sum_i sum_u M_iu        M_iw = exp(A_iw) C_iw / C_i

C_iw counts word w after feature i, and C_i is its sum over w. The adjustment A_iw depends on the type of the feature
and on the sizes of the two counts. It is trained on the end of the training text, with counts of the text before it.
Another feature, present in every context, is uniform over the vocabulary.

A feature is looked up by a 63-bit hash of its words in its type's sorted keys.

Shapes: N positions, C words before a position, K features of a context, F features, E entries of the matrix, V words,
P adjustments (the last is that of the uniform feature), U distinct features and T terms of the held-out text.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lm.config.schema import Features
from lm.data.text.vocabulary import Vocabulary
from lm.ngram.model import NO_WORD, CountModel, Floats
from lm.ngram.trie import Advance, Numbers, find_sorted, pairs
from lm.system.errors import UserError
from lm.system.jit import compiled

BUCKETS = 16
"""Number of count sizes: 1, 2, 3, 4 to 7, 8 to 15, and so on."""
HELD_OUT, MAX_HELD_OUT = 0.05, 100_000
"""Fraction of the training text that the adjustments are trained on, and its maximum number of tokens."""
MIN_TOKENS = 40
FEATURE_BYTES = 24
"""Memory that training needs per token and feature of its context."""
EPOCHS, BATCH, LEARNING_RATE, INITIAL_SQUARES = 8, 64, 0.1, 1e-2
"""Training of the adjustments with Adagrad."""


class FeatureType(NamedTuple):
    """Remote words, then skipped words, then adjacent words. All distances in `skipped` share their counts."""

    adjacent: int
    remote: int = 0
    skipped: tuple[int, ...] = (0,)

    @property
    def min_count(self) -> int:
        """Minimum count: most skip-grams occur once, and leaving them out saves most of the memory."""
        return 2 if self.remote else 1


def feature_types(features: Features) -> list[FeatureType]:
    if features == "ngram5":
        return [FeatureType(adjacent) for adjacent in range(5)]
    if features == "skip5":
        near = [FeatureType(a, r, (s,)) for s in (1, 2, 3) for r in (1, 2, 3) for a in range(5 - r)]
        far = [FeatureType(a, 1, tuple(range(4, 11))) for a in range(2)]
        return [*feature_types("ngram5"), *near, *far]
    near = [FeatureType(a, r, (1,)) for r in range(1, 6) for a in range(6 - r)]
    far = [FeatureType(a, 1, tuple(range(2, 11))) for a in range(4)]
    return [*(FeatureType(adjacent) for adjacent in range(10)), *near, *far]


# ---- counting --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FeatureCounts:
    """Features of all types and the words counted after them, type by type."""

    edges: list[int]
    """Start of each type's features, plus the end of the last."""
    keys_F: NDArray[np.int64]
    """Sorted within each type."""
    starts_F: Numbers
    """Start of each feature's entries, plus the end of the last."""
    words_E: NDArray[np.int32]
    """Word id of each entry, sorted within its feature."""
    counts_E: Numbers

    def adjustments(self) -> tuple[Floats, Numbers, Numbers]:
        """Return C_iw / C_i of each entry, its adjustment's index, and the first adjustment index of each feature."""
        totals_F = np.add.reduceat(self.counts_E, self.starts_F[:-1])
        types_F = np.repeat(np.arange(len(self.edges) - 1), np.diff(self.edges))
        firsts_F = types_F * BUCKETS + buckets(totals_F)
        firsts_F[0] = 0  # the feature without words is the only one of its type
        firsts_F *= BUCKETS
        sizes_F = np.diff(self.starts_F)
        shares_E = self.counts_E / np.repeat(totals_F, sizes_F)
        return shares_E, np.repeat(firsts_F, sizes_F) + buckets(self.counts_E), firsts_F


def buckets(counts: Numbers) -> Numbers:
    sizes: Numbers = np.frexp(counts.astype(np.float64))[1]  # 1 + the binary logarithm, rounded down
    return np.minimum(np.where(counts <= 3, counts - 1, sizes), BUCKETS - 1)


def contexts_of(tokens: NDArray[Any], size: int, *, eos_id: int) -> NDArray[np.int32]:
    """Return a view of the words before each token, most recent first, (N, size)."""
    start = np.array([NO_WORD] * (size - 1) + [eos_id])
    padded = np.append(start, tokens[:-1]).astype(np.int32)
    return np.lib.stride_tricks.sliding_window_view(padded, size)[:, ::-1]


def count_features(
    tokens: NDArray[Any], types: list[FeatureType], *, eos_id: int, advance: Advance = lambda: None
) -> FeatureCounts:
    """Count the words after every feature; `advance` is called after each type."""
    recent_NC = contexts_of(tokens, context_size(types), eos_id=eos_id)
    edges, keys, sizes, words, counts = [0], list[Any](), list[Any](), list[Any](), list[Any]()
    for kind in types:
        found = [(key_N, key_N >= 0) for key_N in keys_of(recent_NC, kind, eos_id=eos_id)]
        all_keys = np.concatenate([key_N[present] for key_N, present in found])
        all_words = np.concatenate([np.asarray(tokens, np.int32)[present] for _, present in found])
        features, feature_of = np.unique(all_keys, return_inverse=True)
        entries, numbers = np.unique(pairs(feature_of, all_words), return_counts=True)
        kept, owner = np.bincount(feature_of) >= kind.min_count, entries >> 32
        keys.append(features[kept])
        sizes.append(np.bincount(owner)[kept])
        words.append(entries[kept[owner]].astype(np.int32))  # the low half
        counts.append(numbers[kept[owner]].astype(np.int32))
        edges.append(edges[-1] + len(keys[-1]))
        advance()
    starts_F = np.append(0, np.cumsum(np.concatenate(sizes)))
    return FeatureCounts(edges, np.concatenate(keys), starts_F, np.concatenate(words), np.concatenate(counts))


def context_size(types: list[FeatureType]) -> int:
    return max(kind.adjacent + max(kind.skipped) + kind.remote for kind in types)


def keys_of(recent_NC: NDArray[Any], kind: FeatureType, *, eos_id: int) -> Iterator[NDArray[np.int64]]:
    """Yield the keys of the feature at each of its distances; -1 if the sentence is too short."""
    for skipped in kind.skipped:
        keys_N = np.empty(len(recent_NC), np.int64)
        hash_words(recent_NC, kind.adjacent, skipped, kind.remote, eos_id, keys_N)
        yield keys_N


@compiled
def hash_words(recent_NC: Any, adjacent: int, skipped: int, remote: int, eos_id: int, keys_N: Any) -> None:
    for row in range(len(recent_NC)):
        key, complete = np.uint64(0), True
        for back in range(adjacent + skipped + remote):
            word = recent_NC[row, back]
            if word < 0 or (back > 0 and recent_NC[row, back - 1] == eos_id):  # features do not cross sentences
                complete = False
                break
            if back < adjacent or back >= adjacent + skipped:
                key = (key ^ np.uint64(word + 1)) * np.uint64(0x9E3779B97F4A7C15)
                key ^= key >> np.uint64(31)
        keys_N[row] = np.int64(key >> np.uint64(1)) if complete else -1


@compiled
def find_all(values: Any, firsts: Any, ends: Any, wanted: Any, found: Any) -> None:
    for row in range(len(wanted)):
        found[row] = find_sorted(values, firsts[row], ends[row], wanted[row])


# ---- the model -------------------------------------------------------------------------------------------------------


class SnmModel(CountModel):
    """A sparse non-negative matrix with a row for each feature."""

    def __init__(
        self, features: Features, table: FeatureCounts, weights_E: Any, uniform: float, *, vocabulary: Vocabulary
    ) -> None:
        self.features, self.table, self.weights_E, self.uniform = features, table, weights_E, uniform
        self.types, self.vocab_size, self.eos_id = feature_types(features), len(vocabulary), vocabulary.eos_id
        self.num_context_words, self.num_ngrams = context_size(self.types), len(weights_E)
        self.name, lengths = f"SNM {features}", [1 + kind.adjacent + kind.remote for kind in self.types]
        entries = np.diff(table.starts_F[table.edges])
        self.sizes = np.bincount(lengths, entries).astype(int).tolist()[1:]
        self.sums_F = np.add.reduceat(weights_E, table.starts_F[:-1], dtype=np.float64)

    def score(self, recent_NC: NDArray[np.int64], words_N: NDArray[np.int64]) -> Floats:
        rows_NK = find_features(self.table, self.types, recent_NC, eos_id=self.eos_id)
        scores_N = np.full(len(words_N), self.uniform / self.vocab_size)
        add_scores(rows_NK, words_N, self.table.starts_F, self.table.words_E, self.weights_E, scores_N)
        log_probs_N: Floats = np.log(scores_N / self._totals(rows_NK))
        return log_probs_N

    def distributions(self, recent_NC: NDArray[np.int64]) -> Floats:
        rows_NK = find_features(self.table, self.types, recent_NC, eos_id=self.eos_id)
        scores_NV = np.full((len(recent_NC), self.vocab_size), self.uniform / self.vocab_size)
        add_rows(rows_NK, self.table.starts_F, self.table.words_E, self.weights_E, scores_NV)
        log_probs_NV: Floats = np.log(scores_NV, out=scores_NV)
        log_probs_NV -= np.log(self._totals(rows_NK))[:, None]
        return log_probs_NV

    def _totals(self, rows_NK: NDArray[np.int64]) -> Floats:
        totals_N: Floats = self.uniform + np.where(rows_NK < 0, 0, self.sums_F[rows_NK]).sum(1)
        return totals_N

    def pack(self) -> dict[str, Any]:
        table = self.table
        arrays = {"keys": table.keys_F, "starts": table.starts_F, "words": table.words_E, "weights": self.weights_E}
        return {"edges": table.edges, "uniform": self.uniform} | {
            name: torch.from_numpy(array) for name, array in arrays.items()
        }


def unpack_snm(packed: dict[str, Any], features: Features, vocabulary: Vocabulary, *, path: Path) -> SnmModel:
    """Load the model from a checkpoint."""
    keys_F, starts_F, words_E, weights_E = (packed[name].numpy() for name in ("keys", "starts", "words", "weights"))
    edges = [int(edge) for edge in packed["edges"]]
    sound = (  # compiled code does not check bounds
        len(edges) == len(feature_types(features)) + 1
        and edges[0] == 0
        and all(first <= end for first, end in pairwise(edges))
        and edges[-1] == len(keys_F) == len(starts_F) - 1 > 0
        and starts_F[0] == 0
        and starts_F[-1] == len(words_E) == len(weights_E)
        and (np.diff(starts_F) > 0).all()
        and ((words_E >= 0) & (words_E < len(vocabulary))).all()
    )
    if not sound:
        raise UserError(f"{path} is damaged: its feature arrays are inconsistent. Train it again with lm.ngram.")
    table = FeatureCounts(edges, keys_F, starts_F, words_E, counts_E=weights_E)
    return SnmModel(features, table, weights_E, float(packed["uniform"]), vocabulary=vocabulary)


def find_features(
    table: FeatureCounts, types: list[FeatureType], recent_NC: NDArray[Any], *, eos_id: int
) -> NDArray[np.int64]:
    """Return the row numbers of each context's features, -1 for those not in the table, (N, K)."""
    columns = []
    for kind, (first, end) in zip(types, pairwise(table.edges), strict=True):
        for keys_N in keys_of(recent_NC, kind, eos_id=eos_id):
            rows_N, same = np.empty(len(keys_N), np.int64), np.ones(len(keys_N), np.int64)
            find_all(table.keys_F, first * same, end * same, keys_N, rows_N)
            columns.append(rows_N)
    return np.stack(columns, 1)


@compiled
def add_scores(rows_NK: Any, words_N: Any, starts_F: Any, words_E: Any, weights_E: Any, scores_N: Any) -> None:
    for n in range(len(rows_NK)):
        for row in rows_NK[n]:
            if row >= 0:
                entry = find_sorted(words_E, starts_F[row], starts_F[row + 1], words_N[n])
                if entry >= 0:
                    scores_N[n] += weights_E[entry]


@compiled
def add_rows(rows_NK: Any, starts_F: Any, words_E: Any, weights_E: Any, scores_NV: Any) -> None:
    for n in range(len(rows_NK)):
        for row in rows_NK[n]:
            if row >= 0:
                for entry in range(starts_F[row], starts_F[row + 1]):
                    scores_NV[n, words_E[entry]] += weights_E[entry]


# ---- training --------------------------------------------------------------------------------------------------------


def train_snm(
    tokens: NDArray[Any], features: Features, *, vocabulary: Vocabulary, advance: Advance = lambda: None
) -> SnmModel:
    """Train the adjustments on the end of the text, then count all of it.

    `advance` is called twice per feature type and once per epoch.
    """
    if len(tokens) < MIN_TOKENS:
        raise UserError(f"features={features} needs at least {MIN_TOKENS} training tokens; got {len(tokens)}.")
    types, eos_id = feature_types(features), vocabulary.eos_id
    first = len(tokens) - min(int(HELD_OUT * len(tokens)), MAX_HELD_OUT)
    table = count_features(tokens[:first], types, eos_id=eos_id, advance=advance)
    held_out = HeldOut.after(table, types, tokens, first, vocabulary=vocabulary)
    theta_P = np.zeros(len(types) * BUCKETS**2 + 1)
    squares_P = np.full_like(theta_P, INITIAL_SQUARES)
    del table
    for _ in range(EPOCHS):
        for start in range(0, len(tokens) - first, BATCH):
            end = min(start + BATCH, len(tokens) - first)
            _, gradient_P = held_out.loss_and_gradient(theta_P, start, end)
            squares_P += gradient_P**2
            theta_P -= LEARNING_RATE * gradient_P / np.sqrt(squares_P)
        advance()
    table = count_features(tokens, types, eos_id=eos_id, advance=advance)
    shares_E, adjustments_E, _ = table.adjustments()
    weights_E = (np.exp(theta_P)[adjustments_E] * shares_E).astype(np.float32)
    return SnmModel(features, table, weights_E, float(np.exp(theta_P[-1])), vocabulary=vocabulary)


@dataclass(frozen=True)
class HeldOut:
    """Held-out tokens, reduced to the terms of their scores and totals.

    All words of a feature with counts of one size share an adjustment, so they are one term.
    """

    tokens_T: Numbers
    """Token that each term belongs to; sorted."""
    adjustments_T: Numbers
    scores_T: Floats
    """C_iw / C_i of the target if its count has that size, otherwise 0."""
    totals_T: Floats
    """Sum of C_iw / C_i."""
    vocab_size: int

    @classmethod
    def after(
        cls, table: FeatureCounts, types: list[FeatureType], tokens: NDArray[Any], first: int, *, vocabulary: Vocabulary
    ) -> "HeldOut":
        """Prepare the tokens from `first` on, given the counts of earlier tokens."""
        recent_NC = contexts_of(tokens, context_size(types), eos_id=vocabulary.eos_id)[first:]
        found_NK = find_features(table, types, recent_NC, eos_id=vocabulary.eos_id)
        at = np.nonzero(found_NK >= 0)[0].astype(np.int32)
        found = found_NK[found_NK >= 0]
        entries = np.empty(len(found), np.int64)
        find_all(table.words_E, table.starts_F[found], table.starts_F[found + 1], tokens[first:][at], entries)
        shares_E, adjustments_E, firsts_F = table.adjustments()
        used_U, rows = np.unique(found, return_inverse=True)
        shares_UB = np.zeros((len(used_U), BUCKETS))
        add_up(used_U, table.starts_F, adjustments_E % BUCKETS, shares_E, shares_UB)
        features, sizes = np.nonzero(shares_UB)
        numbers_U = np.bincount(features)
        lengths = numbers_U[rows]
        # The terms of each feature, one feature after another: term numbers grow by one within a feature.
        jumps = (np.cumsum(numbers_U) - numbers_U)[rows] - (np.cumsum(lengths) - lengths)
        terms = np.repeat(jumps, lengths) + np.arange(lengths.sum())
        adjustments_T = (firsts_F[used_U][features] + sizes).astype(np.int32)[terms]
        targets = np.where(entries < 0, -1, adjustments_E[entries])
        is_target_T = adjustments_T == np.repeat(targets, lengths)
        scores_T = np.where(is_target_T, np.repeat(shares_E[entries].astype(np.float32), lengths), np.float32(0))
        totals_T = shares_UB.astype(np.float32)[features, sizes][terms]
        return cls(np.repeat(at, lengths), adjustments_T, scores_T, totals_T, len(vocabulary))

    def loss_and_gradient(self, theta_P: Floats, first: int, end: int) -> tuple[float, Floats]:
        """Return the negative log-likelihood of tokens `first` to `end`, and its gradient."""
        terms = slice(*np.searchsorted(self.tokens_T, np.array([first, end], np.int32)))  # other types are slow
        tokens, adjustments = self.tokens_T[terms] - first, self.adjustments_T[terms]
        weights_P = np.exp(theta_P)
        scores, totals = (weights_P[adjustments] * of_T[terms] for of_T in (self.scores_T, self.totals_T))
        score_N = weights_P[-1] / self.vocab_size + np.bincount(tokens, scores, minlength=end - first)
        total_N = weights_P[-1] + np.bincount(tokens, totals, minlength=end - first)
        each = totals / total_N[tokens] - scores / score_N[tokens]
        gradient_P = np.bincount(adjustments, each, minlength=len(theta_P)).astype(np.float64)
        gradient_P[-1] = weights_P[-1] * (1 / total_N - 1 / (self.vocab_size * score_N)).sum()
        return float(np.log(total_N / score_N).sum()), gradient_P


@compiled
def add_up(used_U: Any, starts_F: Any, buckets_E: Any, shares_E: Any, shares_UB: Any) -> None:
    for row in range(len(used_U)):
        for entry in range(starts_F[used_U[row]], starts_F[used_U[row] + 1]):
            shares_UB[row, buckets_E[entry]] += shares_E[entry]
