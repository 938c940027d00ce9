"""Exchange clustering: classes of words that maximize the mutual information of adjacent classes.

The objective of Brown et al. (1992), optimized by moving one word at a time to its best class (Kneser and Ney 1993;
Martin, Liermann and Ney 1998). Up to a constant, the class bigram log-likelihood is

    L = sum_ab f(N[a, b]) - sum_a f(left[a]) - sum_b f(right[b]),    f(n) = n log n,

where N counts adjacent pairs of classes and left and right are its row and column sums. A word has few
neighboring classes, so a move changes few cells, and its gain for all C classes costs C times the number of these.

Words are processed by decreasing count. The first pass assigns each word given the words before it, which is a far
better start than random classes. Later passes move words until few moves help. There is no randomness, and ties go to
the lowest class, so the same text always gives the same classes.

Shapes: V words, C classes, P distinct pairs of adjacent words.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm.system.jit import compiled

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

CHUNK_TOKENS = 1 << 24
"""Tokens whose pairs are counted together, so that memory grows with the distinct pairs, not with the text."""
TABLE_SIZE = 1 << 16
"""Number of tabulated values of n log n; nearly all cells are smaller."""
MAX_PASSES = 20


class Neighbours(NamedTuple):
    """The neighbours of each word on one side: those of word w are at start_V[w] to start_V[w + 1]."""

    start_V: Integers
    word_P: Integers
    count_P: Integers


def count_pairs(tokens: NDArray[Any], *, vocab_size: int) -> tuple[Neighbours, Neighbours]:
    """(followers of each word, predecessors of each word) in the running text."""
    keys, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    for start in range(0, max(len(tokens) - 1, 0), CHUNK_TOKENS):
        chunk = np.asarray(tokens[start : start + CHUNK_TOKENS + 1], dtype=np.int64)
        pairs, times = np.unique(chunk[:-1] * vocab_size + chunk[1:], return_counts=True)
        keys, index = np.unique(np.concatenate([keys, pairs]), return_inverse=True)
        counts = np.bincount(index, weights=np.concatenate([counts, times]), minlength=len(keys)).astype(np.int64)
    first, second = np.divmod(keys, vocab_size)
    return _by_word(first, second, counts, vocab_size), _by_word(second, first, counts, vocab_size)


def _by_word(word: Integers, neighbour: Integers, counts: Integers, vocab_size: int) -> Neighbours:
    order = np.argsort(word, kind="stable")
    start_V = np.concatenate([[0], np.cumsum(np.bincount(word, minlength=vocab_size))])
    return Neighbours(start_V, neighbour[order], counts[order])


def exchange(followers: Neighbours, predecessors: Neighbours, *, num_classes: int) -> Iterator[Integers]:
    """The class of each word after each pass, until fewer than one word in a thousand moves."""
    vocab_size = len(followers.start_V) - 1
    class_of_V = np.full(vocab_size, -1, np.int64)
    pairs_CC = np.zeros((num_classes, num_classes), np.int64)
    size_C = np.zeros(num_classes, np.int64)
    table = np.arange(TABLE_SIZE, dtype=np.float64)
    table[1:] *= np.log(table[1:])
    for _ in range(MAX_PASSES):
        moved = _pass(class_of_V, pairs_CC, pairs_CC.T.copy(), size_C, table, followers, predecessors)
        yield class_of_V.copy()
        if moved < vocab_size / 1000:
            return


def mutual_information(classes: Integers, followers: Neighbours) -> float:
    """Mutual information of two adjacent classes in the running text, in nats."""
    num_classes = int(classes.max()) + 1
    first = np.repeat(classes, np.diff(followers.start_V))
    cells = first * num_classes + classes[followers.word_P]
    joint = np.bincount(cells, weights=followers.count_P, minlength=num_classes**2).reshape(num_classes, num_classes)
    joint = joint / max(joint.sum(), 1)
    independent = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    seen = joint > 0
    return float((joint[seen] * np.log(joint[seen] / independent[seen])).sum())


@compiled
def _n_log_n(n: int, table: Floats) -> Any:
    return table[n] if n < len(table) else n * np.log(n)


@compiled
def _gather(word: int, class_of_V: Integers, neighbours: Neighbours, met_C: Integers) -> int:
    """Count the word's neighbours by class; returns the count of the word next to itself, which is left out."""
    beside_itself = 0
    for i in range(neighbours.start_V[word], neighbours.start_V[word + 1]):
        other, count = neighbours.word_P[i], neighbours.count_P[i]
        if other == word:
            beside_itself = count
        elif class_of_V[other] >= 0:
            met_C[class_of_V[other]] += count
    return beside_itself


@compiled
def _change(
    pairs_CC: Integers,
    pairs_T_CC: Integers,
    k: int,
    after_C: Integers,
    before_C: Integers,
    beside_itself: int,
    sign: int,
) -> None:
    """Add the word's pairs to class k, or remove them."""
    for c in range(len(after_C)):
        pairs_CC[k, c] += sign * after_C[c]
        pairs_T_CC[c, k] += sign * after_C[c]
        pairs_CC[c, k] += sign * before_C[c]
        pairs_T_CC[k, c] += sign * before_C[c]
    pairs_CC[k, k] += sign * beside_itself
    pairs_T_CC[k, k] += sign * beside_itself


@compiled
def _add_gain(gain_C: Floats, rows_CC: Integers, met_C: Integers, table: Floats) -> None:
    """Gain of the cells (c, k) for every class k the word might join and each neighbouring class c != k."""
    for c in range(len(met_C)):
        if met_C[c] == 0:
            continue
        for k in range(len(gain_C)):
            n = rows_CC[c, k]
            gain_C[k] += _n_log_n(n + met_C[c], table) - _n_log_n(n, table)
        n = rows_CC[c, c]
        gain_C[c] -= _n_log_n(n + met_C[c], table) - _n_log_n(n, table)


@compiled
def _pass(
    class_of_V: Integers,
    pairs_CC: Integers,
    pairs_T_CC: Integers,
    size_C: Integers,
    table: Floats,
    followers: Neighbours,
    predecessors: Neighbours,
) -> int:
    """Move every word to its best class, updating all arrays; returns the number of words moved."""
    num_classes = len(size_C)
    left_C, right_C = pairs_CC.sum(1), pairs_CC.sum(0)
    moved = 0
    for word in range(len(class_of_V)):
        old = class_of_V[word]
        if old >= 0 and size_C[old] == 1:
            continue  # never empty a class
        after_C, before_C = np.zeros(num_classes, np.int64), np.zeros(num_classes, np.int64)
        itself = _gather(word, class_of_V, followers, after_C)
        _gather(word, class_of_V, predecessors, before_C)
        out, into = after_C.sum() + itself, before_C.sum() + itself
        if old >= 0:
            _change(pairs_CC, pairs_T_CC, old, after_C, before_C, itself, -1)
            left_C[old] -= out
            right_C[old] -= into
            size_C[old] -= 1
        else:  # wherever the word goes, its neighbours' classes gain these pairs
            left_C += before_C
            right_C += after_C
        best = word  # the first words start the classes
        if old >= 0 or word >= num_classes:
            best = _best_class(pairs_CC, pairs_T_CC, left_C, right_C, after_C, before_C, itself, table)
        _change(pairs_CC, pairs_T_CC, best, after_C, before_C, itself, 1)
        left_C[best] += out
        right_C[best] += into
        size_C[best] += 1
        class_of_V[word] = best
        moved += best != old
    return moved


@compiled
def _best_class(
    pairs_CC: Integers,
    pairs_T_CC: Integers,
    left_C: Integers,
    right_C: Integers,
    after_C: Integers,
    before_C: Integers,
    itself: int,
    table: Floats,
) -> Any:
    """The class with the largest gain in likelihood; the lowest of ties."""
    gain_C = np.zeros(len(after_C), np.float64)
    _add_gain(gain_C, pairs_CC, before_C, table)
    _add_gain(gain_C, pairs_T_CC, after_C, table)
    out, into = after_C.sum() + itself, before_C.sum() + itself
    for k in range(len(gain_C)):
        inside = pairs_CC[k, k]
        gain_C[k] += _n_log_n(inside + after_C[k] + before_C[k] + itself, table) - _n_log_n(inside, table)
        gain_C[k] -= _n_log_n(left_C[k] + out, table) - _n_log_n(left_C[k], table)
        gain_C[k] -= _n_log_n(right_C[k] + into, table) - _n_log_n(right_C[k], table)
    return np.argmax(gain_C)
