"""Count the n-grams in a text of word ids.

All positions in the text are sorted by the words that end there, last word first. One sort serves all orders, because
equal n-grams of every order become adjacent. It is a radix sort with one stable pass per order.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lm.ngram.trie import MAX_NODES, Numbers, Trie
from lm.system.errors import UserError
from lm.system.jit import compiled
from lm.system.memory import free_memory, size_of

MAX_ORDER = 9
NGRAM_BYTES = 28
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
    """Count n-grams of all orders up to `order`; `advance` is called after each of `2 * order` passes.

    N-grams at the start of a sentence or of the text begin with `</s>`.
    """
    if not 0 < len(tokens) <= MAX_NODES:
        raise UserError(f"The text must have 1 to {MAX_NODES:,} tokens to count n-grams; it has {len(tokens):,}.")
    words_N = np.asarray(tokens, np.int32)
    reach_N = reaches(words_N, eos_id, order)
    places_N, other_N = np.arange(len(words_N), dtype=np.int32), np.empty(len(words_N), np.int32)
    for back in range(order - 1, -1, -1):
        sort_by_word(words_N, reach_N, places_N, other_N, back, eos_id, vocab_size)
        places_N, other_N = other_N, places_N
        advance()
    del other_N
    differs_N = first_differences(words_N, reach_N, places_N, eos_id, order)
    edges = [0, vocab_size]
    for number in new_ngrams(reach_N, places_N, differs_N, order)[2:].tolist():
        edges.append(edges[-1] + number)
    if edges[-1] > MAX_NODES:
        raise UserError(
            f"order={order} gives {edges[-1]:,} n-grams; at most {MAX_NODES:,} are possible. Try a lower order."
        )
    first_words_M = np.empty(edges[-1], np.int32)
    first_words_M[:vocab_size] = np.arange(vocab_size)
    occurrences_M = np.zeros(edges[-1], np.int32)
    occurrences_M[:vocab_size] = np.bincount(words_N, minlength=vocab_size)
    children_L = np.zeros(edges[-2] + 1, np.int32)
    advance()
    for n in range(2, order + 1):
        parents = (edges[n - 2], edges[n - 1])
        level = first_words_M[parents[1] : edges[n]], occurrences_M[parents[1] : edges[n]]
        fill_order(words_N, reach_N, places_N, differs_N, eos_id, n, *level, children_L[parents[0] : parents[1]])
        advance()
    # Up to here, children_L holds the number of children of each node.
    children_L[:-1] = np.cumsum(children_L[:-1]) - children_L[:-1] + vocab_size
    children_L[-1] = edges[-1]
    return Counts(Trie(first_words_M, children_L, edges), occurrences_M)


@compiled
def reaches(words_N: Any, eos_id: int, order: int) -> Any:
    """Return the length of the longest n-gram ending at each position."""
    reach_N = np.empty(len(words_N), np.uint8)
    reach = 1
    for place in range(len(words_N)):
        begins = place == 0 or words_N[place - 1] == eos_id
        reach = min(order, 2 if begins else reach + 1)
        reach_N[place] = reach
    return reach_N


@compiled
def word_at(words_N: Any, place: int, eos_id: int) -> int:
    """Return the word at a position, or `</s>` before the text."""
    return words_N[place] if place >= 0 else eos_id


@compiled
def sort_by_word(
    words_N: Any, reach_N: Any, places_N: Any, sorted_N: Any, back: int, eos_id: int, vocab_size: int
) -> None:
    """One stable pass: sort positions by the word `back` positions earlier; those that do not reach it come first."""
    next_of = np.zeros(vocab_size + 2, np.int64)
    for place in range(len(words_N)):
        key = word_at(words_N, place - back, eos_id) + 1 if reach_N[place] > back else 0
        next_of[key + 1] += 1
    for key in range(vocab_size + 1):
        next_of[key + 1] += next_of[key]
    for place in places_N:
        key = word_at(words_N, place - back, eos_id) + 1 if reach_N[place] > back else 0
        sorted_N[next_of[key]] = place
        next_of[key] += 1


@compiled
def first_differences(words_N: Any, reach_N: Any, places_N: Any, eos_id: int, order: int) -> Any:
    """Return the lowest order at which each position differs from the previous one in sorted order, or `order + 1`."""
    differs_N = np.empty(len(places_N), np.uint8)
    differs_N[0] = 1
    for number in range(1, len(places_N)):
        place, before = places_N[number], places_N[number - 1]
        shared = min(reach_N[place], reach_N[before])
        back = 0
        while back < shared and word_at(words_N, place - back, eos_id) == word_at(words_N, before - back, eos_id):
            back += 1
        ended = back == reach_N[place] and back == reach_N[before]
        differs_N[number] = order + 1 if ended else back + 1
    return differs_N


@compiled
def new_ngrams(reach_N: Any, places_N: Any, differs_N: Any, order: int) -> Any:
    """Count the distinct n-grams of each order."""
    numbers = np.zeros(order + 1, np.int64)
    for number in range(len(places_N)):
        for n in range(differs_N[number], reach_N[places_N[number]] + 1):
            numbers[n] += 1
    return numbers


@compiled
def fill_order(
    words_N: Any,
    reach_N: Any,
    places_N: Any,
    differs_N: Any,
    eos_id: int,
    n: int,
    first_words: Any,
    occurrences: Any,
    children: Any,
) -> None:
    """Fill in first words and counts of one order's n-grams, and child counts of the next lower order."""
    node = parent = -1
    for number in range(len(places_N)):
        place, differs = places_N[number], differs_N[number]
        if n == 2:
            parent = words_N[place]
        elif reach_N[place] >= n - 1 and differs <= n - 1:
            parent += 1
        if reach_N[place] >= n:
            if differs <= n:
                node += 1
                first_words[node] = word_at(words_N, place - n + 1, eos_id)
                children[parent] += 1
            occurrences[node] += 1
