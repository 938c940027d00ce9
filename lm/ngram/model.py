"""A back-off n-gram model: look-up of many words at once, and whole distributions.

p(w | h) is that of the longest n-gram of `h w` that the model has, times the back-offs of the longer contexts.

Shapes: M n-grams, L of them below the highest order, V words, N places in a text, C = order - 1 words before a place.
"""

import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lm.data.text.vocabulary import Vocabulary
from lm.ngram.trie import Trie, find_child
from lm.system.console import Progress
from lm.system.errors import UserError
from lm.system.jit import compiled

Floats = NDArray[np.float64]
NO_WORD = -1
"""Before the beginning of a text."""


class NgramModel:
    """Natural logarithms of probabilities and back-offs, on the n-grams of a trie."""

    def __init__(self, trie: Trie, log_probs_M: Floats, log_back_offs_L: Floats, *, eos_id: int) -> None:
        self.trie, self.log_probs_M, self.log_back_offs_L, self.eos_id = trie, log_probs_M, log_back_offs_L, eos_id

    @property
    def order(self) -> int:
        return self.trie.order

    @property
    def vocab_size(self) -> int:
        return self.trie.sizes[0]

    def score(self, recent_NC: NDArray[np.int64], words_N: NDArray[np.int64]) -> Floats:
        """Log-probability of each word after its context: the words before it, the last one first."""
        contexts_NC = self._contexts(recent_NC)
        log_probs_N = np.empty(len(words_N))
        arrays = self.trie.words_M, self.trie.children_L, self.log_probs_M, self.log_back_offs_L
        look_up(*arrays, recent_NC, contexts_NC, words_N, log_probs_N)
        return log_probs_N

    def distributions(self, recent_NC: NDArray[np.int64]) -> Floats:
        """Log-probabilities of all words after each context, (N, V)."""
        contexts_NC = self._contexts(recent_NC)
        log_probs_NV = np.tile(self.log_probs_M[: self.vocab_size], (len(recent_NC), 1))
        spread(self.log_probs_M, self.log_back_offs_L, *self._followers, contexts_NC, log_probs_NV)
        return log_probs_NV

    def _contexts(self, recent_NC: NDArray[np.int64]) -> NDArray[np.int64]:
        """The nodes of the last word, the last two, and so on; -1 where the model has none."""
        contexts_NC = np.full_like(recent_NC, -1)
        find_contexts(self.trie.words_M, self.trie.children_L, recent_NC, self.eos_id, contexts_NC)
        return contexts_NC

    @cached_property
    def _followers(self) -> tuple[Any, Any, Any]:
        """Where each context's n-grams begin, the n-grams sorted by context, and their last words.

        Built when a distribution is first asked for; scoring needs only the trie.
        """
        with Progress(3, label="index", unit="passes", to=sys.stderr) as progress:
            contexts_M, first = self.trie.contexts(), self.vocab_size
            progress.advance()
            starts_L = np.zeros(len(self.log_back_offs_L) + 1, np.int64)
            nodes = np.empty(len(contexts_M) - first, np.int32)
            sort_by_context(contexts_M, first, starts_L, nodes)
            progress.advance()
            return starts_L, nodes, self.trie.last_words()[nodes]


@compiled
def sort_by_context(contexts_M: Any, first: int, starts_L: Any, nodes: Any) -> None:
    """A counting sort of the n-grams from `first` on; `starts_L` are zeros and become each context's place."""
    for node in range(first, len(contexts_M)):
        starts_L[contexts_M[node] + 1] += 1
    for context in range(1, len(starts_L)):
        starts_L[context] += starts_L[context - 1]
    for node in range(first, len(contexts_M)):
        nodes[starts_L[contexts_M[node]]] = node
        starts_L[contexts_M[node]] += 1
    starts_L[1:] = starts_L[:-1].copy()  # each stands where the next one begins
    starts_L[0] = 0


@compiled
def find_contexts(words_M: Any, children_L: Any, recent_NC: Any, eos_id: int, contexts_NC: Any) -> None:
    for row in range(len(recent_NC)):
        node = -1
        for back in range(recent_NC.shape[1]):
            word = recent_NC[row, back]
            if word < 0 or (back > 0 and recent_NC[row, back - 1] == eos_id):  # contexts stay in their sentence
                break
            node = word if back == 0 else find_child(words_M, children_L, node, word)
            if node < 0:
                break
            contexts_NC[row, back] = node


@compiled
def look_up(
    words_M: Any,
    children_L: Any,
    log_probs_M: Any,
    log_back_offs_L: Any,
    recent_NC: Any,
    contexts_NC: Any,
    words_N: Any,
    found_N: Any,
) -> None:
    for row in range(len(words_N)):
        node, back = words_N[row], 0
        while back < recent_NC.shape[1] and contexts_NC[row, back] >= 0:
            longer = find_child(words_M, children_L, node, recent_NC[row, back])
            if longer < 0:
                break
            node = longer
            back += 1
        found = log_probs_M[node]
        while back < recent_NC.shape[1] and contexts_NC[row, back] >= 0:
            found += log_back_offs_L[contexts_NC[row, back]]
            back += 1
        found_N[row] = found


@compiled
def spread(
    log_probs_M: Any,
    log_back_offs_L: Any,
    starts_L: Any,
    nodes: Any,
    last_words: Any,
    contexts_NC: Any,
    found_NV: Any,
) -> None:
    """From the words' own probabilities to those after each context, one order after the other."""
    for row in range(len(found_NV)):
        for context in contexts_NC[row]:
            if context < 0:
                break
            found_NV[row] += log_back_offs_L[context]
            for number in range(starts_L[context], starts_L[context + 1]):
                found_NV[row, last_words[number]] = log_probs_M[nodes[number]]


def pack_ngrams(model: NgramModel) -> dict[str, Any]:
    """As a checkpoint holds it: plain arrays."""
    trie = model.trie
    arrays: dict[str, Any] = {"words": trie.words_M, "children": trie.children_L}
    arrays |= {"log_probs": model.log_probs_M, "log_back_offs": model.log_back_offs_L}
    return {"edges": trie.edges} | {name: torch.from_numpy(array) for name, array in arrays.items()}


def unpack_ngrams(packed: dict[str, Any], vocabulary: Vocabulary, *, path: Path) -> NgramModel:
    names = ("words", "children", "log_probs", "log_back_offs")
    words_M, children_L, log_probs_M, log_back_offs_L = (packed[name].numpy() for name in names)
    trie = Trie(words_M, children_L, [int(edge) for edge in packed["edges"]])
    if len(trie.edges) < 2 or not trie.is_sound(len(vocabulary)):
        raise UserError(f"{path} is damaged: its n-gram arrays are inconsistent. Count them again with lm.ngram.")
    if len(log_probs_M) != len(words_M) or len(log_back_offs_L) != trie.edges[-2]:
        raise UserError(f"{path} is damaged: its n-grams lack probabilities. Count them again with lm.ngram.")
    return NgramModel(trie, log_probs_M, log_back_offs_L, eos_id=vocabulary.eos_id)
