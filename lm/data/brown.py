"""Brown classes for `hsm_sim`: word classes that maximize the mutual information of adjacent classes.

The objective of Brown et al. (1992), optimized by exchange clustering: one word at a time moves to its best class
(Kneser and Ney 1993; Martin, Liermann and Ney 1998). Up to a constant, the class bigram log-likelihood is

    L = sum_ab f(N[a, b]) - sum_a f(left[a]) - sum_b f(right[b]),    f(n) = n log n,

where N counts adjacent pairs of classes and left and right are its row and column sums. A word has few
neighboring classes, so a move changes few cells, and its gain for all C classes costs C times the number of these.

Words are processed by decreasing count. The first pass assigns each word given the words before it, which is a far
better start than random classes. Later passes move words until few moves help. Nothing is random, and ties go to
the lowest class, so the same text always gives the same classes.

Shapes: V words, C classes, P distinct pairs of adjacent words.
"""

import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm.system.console import say
from lm.system.files import write_whole
from lm.system.jit import compiled

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

FORMAT = 1
"""Part of the cache file's name; increment it when a change of the algorithm changes the classes."""
CHUNK_TOKENS = 1 << 24
"""Tokens counted per pass, so that memory grows with the distinct pairs, not with the text."""
TABLE_SIZE = 1 << 16
"""Number of tabulated values of n log n; nearly all cells are smaller."""
MAX_PASSES = 20


def brown_classes(
    tokens: NDArray[Any], *, vocab_size: int, num_classes: int, cache_dir: Path, corpus_hash: str
) -> Integers:
    """Cluster words by their neighbors in the training tokens, or load the cached classes. No class is empty.

    The cache is keyed by the corpus's hash and the number of classes.
    """
    path = cache_dir / f"brown-{FORMAT}-{corpus_hash[:16]}-{num_classes}.npz"
    with suppress(FileNotFoundError, KeyError, ValueError, EOFError, zipfile.BadZipFile), np.load(path) as content:
        classes: Integers = content["classes"].astype(np.int64)
        if classes.shape == (vocab_size,) and np.array_equal(np.unique(classes), np.arange(num_classes)):
            say(f"{num_classes} Brown classes from {path}")
            return classes
    start = time.monotonic()
    followers, predecessors = count_pairs(tokens, vocab_size=vocab_size)
    *_, classes = exchange(followers, predecessors, num_classes=num_classes)
    say(f"{num_classes} Brown classes in {time.monotonic() - start:.0f} s, kept in {path}")
    cache_dir.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):  # another run has just written the same classes
        write_whole(path, lambda file: np.savez_compressed(file, classes=classes))
    return classes


class Neighbors(NamedTuple):
    """The neighbors of each word on one side: those of word w are at start_V[w] to start_V[w + 1]."""

    start_V: Integers
    word_P: Integers
    count_P: Integers


def count_pairs(tokens: NDArray[Any], *, vocab_size: int) -> tuple[Neighbors, Neighbors]:
    """Count the followers and the predecessors of each word in the text."""
    keys, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    for start in range(0, max(len(tokens) - 1, 0), CHUNK_TOKENS):
        chunk = np.asarray(tokens[start : start + CHUNK_TOKENS + 1], dtype=np.int64)
        pairs, times = np.unique(chunk[:-1] * vocab_size + chunk[1:], return_counts=True)
        keys, index = np.unique(np.concatenate([keys, pairs]), return_inverse=True)
        counts = np.bincount(index, weights=np.concatenate([counts, times]), minlength=len(keys)).astype(np.int64)
    first, second = np.divmod(keys, vocab_size)
    return _by_word(first, second, counts, vocab_size), _by_word(second, first, counts, vocab_size)


def _by_word(word: Integers, neighbor: Integers, counts: Integers, vocab_size: int) -> Neighbors:
    order = np.argsort(word, kind="stable")
    start_V = np.concatenate([[0], np.cumsum(np.bincount(word, minlength=vocab_size))])
    return Neighbors(start_V, neighbor[order], counts[order])


def exchange(followers: Neighbors, predecessors: Neighbors, *, num_classes: int) -> Iterator[Integers]:
    """Yield the class of each word after each pass, until fewer than one word in a thousand moves."""
    vocab_size = len(followers.start_V) - 1
    class_of_V = np.full(vocab_size, -1, np.int64)
    shape = (2, num_classes, num_classes)
    counts = ClassCounts(np.zeros(shape, np.int64), np.zeros(shape[:2], np.int64), np.zeros(num_classes, np.int64))
    n_log_n = np.arange(TABLE_SIZE, dtype=np.float64)
    n_log_n[1:] *= np.log(n_log_n[1:])
    for _ in range(MAX_PASSES):
        moved = _pass(class_of_V, counts, (followers, predecessors), n_log_n)
        yield class_of_V.copy()
        if moved < vocab_size / 1000:
            return


# ---- compiled code ---------------------------------------------------------------------------------------------


class ClassCounts(NamedTuple):
    """Class bigram counts, updated after every move; side 0 counts following classes, side 1 preceding ones."""

    pairs_2CC: Integers
    """Counts by class and neighboring class; side 1 is the transpose of side 0."""
    sums_2C: Integers
    """Row sums: how often a class has a neighbor on that side."""
    size_C: Integers
    """Number of words in each class."""


@compiled
def _pass(class_of_V: Integers, counts: ClassCounts, neighbors: tuple[Neighbors, Neighbors], table: Floats) -> int:
    """Move every word to its best class, updating all arrays; return the number of words moved."""
    moved = 0
    for word in range(len(class_of_V)):
        old = class_of_V[word]
        if old >= 0 and counts.size_C[old] == 1:
            continue  # never empty a class
        met_2C, itself = np.zeros_like(counts.sums_2C), 0
        for side in range(2):
            itself = _gather(word, class_of_V, neighbors[side], met_2C[side])
        if old >= 0:
            _change(counts, old, met_2C, itself, -1)
        else:  # whatever class the word joins, its neighbors' classes gain these pairs
            for side in range(2):
                counts.sums_2C[1 - side] += met_2C[side]
        best = word  # the first words start the classes
        if old >= 0 or word >= len(counts.size_C):
            best = _best_class(counts, met_2C, itself, table)
        _change(counts, best, met_2C, itself, 1)
        class_of_V[word] = best
        moved += best != old
    return moved


@compiled
def _gather(word: int, class_of_V: Integers, neighbors: Neighbors, met_C: Integers) -> int:
    """Count the word's neighbors by class; return the count of the word next to itself, which is left out."""
    beside_itself = 0
    for i in range(neighbors.start_V[word], neighbors.start_V[word + 1]):
        other, count = neighbors.word_P[i], neighbors.count_P[i]
        if other == word:
            beside_itself = count
        elif class_of_V[other] >= 0:
            met_C[class_of_V[other]] += count
    return beside_itself


@compiled
def _change(counts: ClassCounts, k: int, met_2C: Integers, itself: int, sign: int) -> None:
    """Add a word with these neighbors to class k, or remove it."""
    for side in range(2):
        for c in range(len(counts.size_C)):
            counts.pairs_2CC[side, k, c] += sign * met_2C[side, c]
            counts.pairs_2CC[1 - side, c, k] += sign * met_2C[side, c]
        counts.pairs_2CC[side, k, k] += sign * itself
        counts.sums_2C[side, k] += sign * (met_2C[side].sum() + itself)
    counts.size_C[k] += sign


@compiled
def _best_class(counts: ClassCounts, met_2C: Integers, itself: int, table: Floats) -> Any:
    """Return the class with the largest likelihood gain; ties go to the lowest class."""
    gain_C, moved_2 = np.zeros(len(counts.size_C), np.float64), met_2C.sum(axis=1) + itself
    for side in range(1, -1, -1):
        _add_gain(gain_C, counts.pairs_2CC[1 - side], met_2C[side], table)
    for k in range(len(gain_C)):
        inside = counts.pairs_2CC[0, k, k]
        joined = inside + met_2C[0, k] + met_2C[1, k] + itself
        gain_C[k] += _n_log_n(joined, table) - _n_log_n(inside, table)
        for side in range(2):
            total = counts.sums_2C[side, k]
            gain_C[k] -= _n_log_n(total + moved_2[side], table) - _n_log_n(total, table)
    return np.argmax(gain_C)


@compiled
def _add_gain(gain_C: Floats, rows_CC: Integers, met_C: Integers, table: Floats) -> None:
    """Gain of the cells (c, k) for every class k the word might join and each neighboring class c != k."""
    for c in range(len(met_C)):
        if met_C[c] == 0:
            continue
        for k in range(len(gain_C)):
            gain_C[k] += _n_log_n(rows_CC[c, k] + met_C[c], table) - _n_log_n(rows_CC[c, k], table)
        gain_C[c] -= _n_log_n(rows_CC[c, c] + met_C[c], table) - _n_log_n(rows_CC[c, c], table)


@compiled
def _n_log_n(n: int, table: Floats) -> Any:
    return table[n] if n < len(table) else n * np.log(n)
