"""N-grams of all orders in flat sorted arrays, and their counts in a text.

Each n-gram is a node. Its parent is the n-gram without its first word, so a path from the root reads the words
backwards. A node's children are contiguous, sorted by their first word. Nodes are numbered by order: first the V words,
then the bigrams, and so on.

A sentence starts after `</s>`, which is the first word of n-grams at its start. Contexts do not cross sentences, so an
n-gram that begins with `</s>` has no children.

Shapes: M nodes, L of them below the highest order, V words.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lm.system.errors import UserError
from lm.system.jit import compiled
from lm.system.memory import free_memory, size_of

Numbers = NDArray[np.integer[Any]]
Advance = Callable[[], object]
"""Called after each part of the work."""
MAX_NODES = (1 << 31) - 1
"""Maximum number of nodes, which have 32-bit numbers."""


def pairs(high: NDArray[Any], low: NDArray[Any] | int) -> NDArray[np.int64]:
    """Join two numbers below 2^31 to one that is sorted by the first, then by the second."""
    return high.astype(np.int64) << 32 | low


@dataclass(frozen=True)
class Trie:
    """A set of n-grams."""

    words_M: Numbers
    """First word of each n-gram."""
    children_L: Numbers
    """Start of each node's children, plus the end of the last."""
    edges: list[int]
    """Start of each order's nodes, plus the end of the last."""

    @property
    def order(self) -> int:
        return len(self.edges) - 1

    @property
    def sizes(self) -> list[int]:
        """Number of n-grams per order."""
        return [end - first for first, end in pairwise(self.edges)]

    def nodes(self, order: int) -> slice:
        return slice(self.edges[order - 1], self.edges[order])

    def parents(self, order: int) -> Numbers:
        """Return the parents of n-grams of an order above 1."""
        first, end = self.edges[order - 2 : order]
        return np.repeat(np.arange(first, end, dtype=np.int32), np.diff(self.children_L[first : end + 1]))

    def contexts(self) -> Numbers:
        """Return the node of each n-gram without its last word; -1 for words."""
        contexts_M = np.full(len(self.words_M), -1, np.int32)
        for order in range(2, self.order + 1):
            first, end = self.edges[order - 2 : order]
            fill_contexts(self.words_M, self.children_L, contexts_M, first, end)
        return contexts_M

    def last_words(self) -> Numbers:
        """Return the last word of each n-gram."""
        last_M = np.arange(len(self.words_M), dtype=np.int32)  # unigrams; children inherit their parent's
        for order in range(2, self.order + 1):
            last_M[self.nodes(order)] = last_M[self.parents(order)]
        return last_M

    def word_ids(self, order: int) -> Numbers:
        """Return the words of an order's n-grams in reading order, (nodes, order)."""
        at: Numbers = np.arange(*self.edges[order - 1 : order + 1])
        columns = []
        for lower in range(order, 1, -1):
            columns.append(self.words_M[at])
            at = self.parents(lower)[at - self.edges[lower - 1]]
        return np.stack([*columns, self.words_M[at]], 1)

    def is_sound(self, vocab_size: int) -> bool:
        """Whether all indices are in range."""
        edges, children_L = self.edges, self.children_L
        return bool(
            edges[:2] == [0, vocab_size]
            and all(first <= end for first, end in pairwise(edges))
            and len(self.words_M) == edges[-1] <= MAX_NODES
            and len(children_L) == edges[-2] + 1
            and (np.diff(children_L) >= 0).all()
            and all(children_L[edge] == below for edge, below in pairwise(edges))
            and (self.words_M[:vocab_size] == np.arange(vocab_size)).all()
            and ((self.words_M >= 0) & (self.words_M < vocab_size)).all()
        )


@compiled
def find_sorted(values: Any, first: int, end: int, value: int) -> int:
    """Return the index of `value` in a sorted range, or -1."""
    last = end
    while first < end:
        middle = (first + end) >> 1
        if values[middle] < value:
            first = middle + 1
        else:
            end = middle
    return first if first < last and values[first] == value else -1


@compiled
def find_child(words_M: Any, children_L: Any, node: int, word: int) -> int:
    """Find a node's child that begins with `word`, or -1; the node must be below the highest order."""
    return find_sorted(words_M, children_L[node], children_L[node + 1], word)


@compiled
def fill_contexts(words_M: Any, children_L: Any, contexts_M: Any, first: int, end: int) -> None:
    """Fill in contexts for children of the nodes in [first, end).

    The context of `a b c` is `a b`: the child `a` of `b`, which is the context of its parent `b c`.
    """
    for parent in range(first, end):
        context = contexts_M[parent]
        for node in range(children_L[parent], children_L[parent + 1]):
            contexts_M[node] = words_M[node] if context < 0 else find_child(words_M, children_L, context, words_M[node])


# ---- counting --------------------------------------------------------------------------------------------------------
#
# An n-gram is known by the node of its last n - 1 words and by its first word. Sorting these pairs of numbers puts the
# n-grams of an order into the order of the trie.


MAX_ORDER = 9
NGRAM_BYTES = 32
"""Memory that counting and smoothing need per n-gram; most of the higher orders' n-grams are distinct."""


def require_memory(needed: int, *, doing: str, fix: str) -> None:
    """Raise UserError if more memory is needed than is free."""
    free = free_memory(torch.device("cpu"))
    if free is not None and needed > free:
        raise UserError(f"{doing} needs about {size_of(needed)} of memory, but {size_of(free)} are free. {fix}")


class Counts(NamedTuple):
    """N-grams of a text with their counts."""

    trie: Trie
    occurrences_M: Numbers


def count_ngrams(
    tokens: NDArray[Any], *, order: int, vocab_size: int, eos_id: int, advance: Advance = lambda: None
) -> Counts:
    """Count n-grams of all orders up to `order`; `advance` is called after each order above 1.

    N-grams at the start of a sentence or of the text begin with `</s>`.
    """
    if not 0 < len(tokens) <= MAX_NODES:
        raise UserError(f"The text must have 1 to {MAX_NODES:,} tokens to count n-grams; it has {len(tokens):,}.")
    text = np.append(eos_id, tokens).astype(np.int32)
    # Of the n-gram that ends at each position: the position of its first word, and its node.
    starts, nodes, edges = np.arange(1, len(text)), text[1:].astype(np.int64), [0, vocab_size]
    first_words, occurrences = [np.arange(vocab_size, dtype=np.int32)], [np.bincount(nodes, minlength=vocab_size)]
    children = []
    for n in range(2, order + 1):
        inside = (text[starts] != eos_id) | (n == 2)  # `</s>` is the last word, or else the first
        starts, nodes = starts[inside] - 1, nodes[inside]
        keys, (above, first) = pairs(nodes, text[starts]), edges[-2:]
        if n < order:
            keys, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
            nodes = first + inverse
        else:
            keys, counts = np.unique(keys, return_counts=True)
        children.append(first + np.searchsorted(keys, pairs(np.arange(above, first), 0)).astype(np.int32))
        first_words.append(keys.astype(np.int32))  # the low half
        occurrences.append(counts.astype(np.int32))
        edges.append(first + len(keys))
        if edges[-1] > MAX_NODES:
            raise UserError(f"order={order} gives more than {MAX_NODES:,} n-grams. Try a lower order.")
        advance()
    children_L = np.concatenate([*children, [edges[-1]]], dtype=np.int32)
    occurrences_M = np.concatenate(occurrences, dtype=np.int32)
    return Counts(Trie(np.concatenate(first_words), children_L, edges), occurrences_M)
