"""Count the n-grams in a text of word ids.

An n-gram is known by the node of its last n - 1 words and by its first word. Sorting these pairs of numbers puts the
n-grams of an order into the order of the trie.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lm.ngram.trie import MAX_NODES, Numbers, Trie, pairs
from lm.system.errors import UserError
from lm.system.memory import free_memory, size_of

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
    tokens: NDArray[Any], *, order: int, vocab_size: int, eos_id: int, advance: Callable[[], object] = lambda: None
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
