"""Back-off n-gram models: word probabilities, full distributions, and use as predictors.

p(w | h) is the probability of the longest suffix of `h w` in the model, times the back-offs of the longer contexts.

Shapes: M n-grams, L of them below the highest order, V words, N positions in a text, C = order - 1 words before a
position, T steps, B streams.
"""

from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.data.text.vocabulary import Vocabulary
from lm.model.base import State
from lm.model.predictor import Predictions, Predictor
from lm.ngram.trie import Trie, find_child, pairs
from lm.output.base import IGNORE_INDEX
from lm.system.errors import UserError
from lm.system.jit import compiled

Floats = NDArray[np.float64]
NO_WORD = -1
"""Placeholder for words before the start of a text."""
STREAMS = 16
"""Number of streams that a split is cut into; it does not affect n-gram results."""
PACKED = ("words", "children", "log_probs", "log_back_offs")
"""Names of the arrays in a checkpoint."""


class CountModel(ABC):
    """A model estimated from counts; its predictions depend on the last few words."""

    vocab_size: int
    num_context_words: int
    num_ngrams: int
    """Number of stored probabilities or weights."""
    sizes: list[int]
    """Number of n-grams of one word, two words, and so on."""
    name: str

    @abstractmethod
    def score(self, recent_NC: NDArray[np.int64], words_N: NDArray[np.int64]) -> Floats:
        """Log-probability of each word; its context is the preceding words, most recent first."""

    @abstractmethod
    def distributions(self, recent_NC: NDArray[np.int64]) -> Floats:
        """Log-probabilities of all words after each context, (N, V)."""

    @abstractmethod
    def pack(self) -> dict[str, Any]:
        """Convert to plain arrays for a checkpoint."""


class Arrays(NamedTuple):
    """What compiled code reads of an n-gram model."""

    words_M: Any
    children_L: Any
    log_probs_M: Any
    log_back_offs_L: Any


class NgramModel(CountModel):
    """A trie of n-grams with natural-log probabilities and back-offs."""

    def __init__(self, trie: Trie, log_probs_M: Floats, log_back_offs_L: Floats, *, eos_id: int) -> None:
        self.trie, self.log_probs_M, self.log_back_offs_L, self.eos_id = trie, log_probs_M, log_back_offs_L, eos_id
        self.arrays = Arrays(trie.words_M, trie.children_L, log_probs_M, log_back_offs_L)
        self.order, self.vocab_size, self.num_ngrams = trie.order, trie.sizes[0], len(log_probs_M)
        self.num_context_words, self.sizes, self.name = trie.order - 1, trie.sizes, f"{trie.order}-gram"

    def score(self, recent_NC: NDArray[np.int64], words_N: NDArray[np.int64]) -> Floats:
        contexts_NC = self._contexts(recent_NC)
        log_probs_N = np.empty(len(words_N))
        look_up(self.arrays, recent_NC, contexts_NC, words_N, log_probs_N)
        return log_probs_N

    def distributions(self, recent_NC: NDArray[np.int64]) -> Floats:
        contexts_NC = self._contexts(recent_NC)
        log_probs_NV = np.tile(self.log_probs_M[: self.vocab_size], (len(recent_NC), 1))
        spread(self.arrays, *self._followers, contexts_NC, log_probs_NV)
        return log_probs_NV

    def pack(self) -> dict[str, Any]:
        return {"edges": self.trie.edges, **dict(zip(PACKED, map(torch.from_numpy, self.arrays), strict=True))}

    def _contexts(self, recent_NC: NDArray[np.int64]) -> NDArray[np.int64]:
        """Nodes of the last word, the last two words, and so on; -1 for n-grams not in the model."""
        contexts_NC = np.full_like(recent_NC, -1)
        find_contexts(self.trie.words_M, self.trie.children_L, recent_NC, self.eos_id, contexts_NC)
        return contexts_NC

    @cached_property
    def _followers(self) -> tuple[Any, Any, Any]:
        """Return each context's start, the n-grams sorted by context, and their last words.

        Built for the first full distribution; scoring only needs the trie.
        """
        contexts, first = self.trie.contexts()[self.vocab_size :], self.vocab_size
        keys = pairs(contexts, np.arange(first, first + len(contexts)))
        keys.sort()
        starts_L = np.searchsorted(keys, pairs(np.arange(len(self.log_back_offs_L) + 1), 0))
        nodes = keys.astype(np.int32)  # the low half
        return starts_L, nodes, self.trie.last_words()[nodes]


@compiled
def find_contexts(words_M: Any, children_L: Any, recent_NC: Any, eos_id: int, contexts_NC: Any) -> None:
    for row in range(len(recent_NC)):
        node = -1
        for back in range(recent_NC.shape[1]):
            word = recent_NC[row, back]
            if word < 0 or (back > 0 and recent_NC[row, back - 1] == eos_id):  # contexts do not cross sentences
                break
            node = word if back == 0 else find_child(words_M, children_L, node, word)
            if node < 0:
                break
            contexts_NC[row, back] = node


@compiled
def look_up(arrays: Arrays, recent_NC: Any, contexts_NC: Any, words_N: Any, log_probs_N: Any) -> None:
    for row in range(len(words_N)):
        node, back = words_N[row], 0
        while back < recent_NC.shape[1] and contexts_NC[row, back] >= 0:
            longer = find_child(arrays.words_M, arrays.children_L, node, recent_NC[row, back])
            if longer < 0:
                break
            node = longer
            back += 1
        log_probs_N[row] = arrays.log_probs_M[node]
        while back < recent_NC.shape[1] and contexts_NC[row, back] >= 0:
            log_probs_N[row] += arrays.log_back_offs_L[contexts_NC[row, back]]
            back += 1


@compiled
def spread(arrays: Arrays, starts_L: Any, nodes: Any, last_words: Any, contexts_NC: Any, log_probs_NV: Any) -> None:
    """Update unigram log-probabilities to those after each context, order by order."""
    for row in range(len(log_probs_NV)):
        for context in contexts_NC[row]:
            if context < 0:
                break
            log_probs_NV[row] += arrays.log_back_offs_L[context]
            for i in range(starts_L[context], starts_L[context + 1]):
                log_probs_NV[row, last_words[i]] = arrays.log_probs_M[nodes[i]]


def unpack_ngrams(packed: dict[str, Any], vocabulary: Vocabulary, *, path: Path) -> NgramModel:
    """Load the model from a checkpoint."""
    words_M, children_L, log_probs_M, log_back_offs_L = (packed[name].numpy() for name in PACKED)
    trie = Trie(words_M, children_L, [int(edge) for edge in packed["edges"]])
    sound = len(trie.edges) >= 2 and trie.is_sound(len(vocabulary))  # compiled code does not check bounds
    if not sound or len(log_probs_M) != len(words_M) or len(log_back_offs_L) != trie.edges[-2]:
        raise UserError(f"{path} is damaged: its n-gram arrays are inconsistent. Count them again with lm.ngram.")
    return NgramModel(trie, log_probs_M, log_back_offs_L, eos_id=vocabulary.eos_id)


class NgramPredictor(Predictor):
    """Wraps a count model as a predictor, computed on the host in float64; its state is the last few words."""

    def __init__(self, model: CountModel) -> None:
        super().__init__()
        self.model = model
        self.vocab_size = model.vocab_size
        self.num_ngrams = model.num_ngrams

    def initial_state(self, num_streams: int) -> State:
        return torch.full((self.model.num_context_words, num_streams), NO_WORD)

    def read(self, words_TB: Tensor, state: State) -> tuple["NgramPredictions", State]:
        text = torch.cat([state, words_TB.cpu()])
        recent_TBC = words_TB.new_empty(*words_TB.shape, 0)
        if len(state):  # windows of C words ending at each word, most recent first
            recent_TBC = text.unfold(0, len(state), 1)[1:].flip(-1)
        return NgramPredictions(recent_TBC, self.model), text[len(words_TB) :]


class NgramPredictions(Predictions):
    """Predictions given `recent`, the words before each position, most recent first, (..., C)."""

    def __init__(self, recent: Tensor, model: CountModel) -> None:
        self.recent, self.model = recent, model

    def at(self, steps_N: Tensor, streams_N: Tensor) -> "NgramPredictions":
        return NgramPredictions(self.recent[steps_N, streams_N], self.model)

    def nll(self, targets: Tensor) -> Tensor:
        flat = targets.cpu().flatten()
        scored = (flat != IGNORE_INDEX).numpy()
        nll = np.zeros(len(flat))
        nll[scored] = -self.model.score(self._rows()[scored], flat.numpy()[scored])
        return torch.from_numpy(nll).view(targets.shape)

    def log_prob(self) -> Tensor:
        log_prob = torch.from_numpy(self.model.distributions(self._rows()))
        return log_prob.view(*self.recent.shape[:-1], -1)

    def _rows(self) -> NDArray[np.int64]:
        rows: NDArray[np.int64] = self.recent.flatten(0, -2).contiguous().numpy()
        return rows
