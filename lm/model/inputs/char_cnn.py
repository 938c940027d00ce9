"""Word vectors computed from characters (Kim et al., 2016; Józefowicz et al., 2016; Table 2's best network).

A word is represented by its UTF-8 bytes between begin and end markers. Convolutions of width 1, 2, 3, ... run over byte
embeddings. Their max-pooled outputs pass through two highway layers and a projection. A training step computes each
distinct word in the batch once. Evaluation caches each word's vector. OOV words have vectors too.

Shapes: U words, L bytes, C byte-embedding width, F filters, E word-vector width, V words.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from lm.config.groups import InputConfig, Width, plugin
from lm.data.batches import DistinctWords
from lm.model.base import Input, InputSizes

PADDING, BEGIN, END = 0x00, 0xFE, 0xFF
"""Marker bytes that occur in no word: NUL, and two that are invalid in UTF-8."""
HIGHWAYS = 2
WORDS_AT_ONCE = 1024
"""Words computed simultaneously in evaluation, to bound memory."""


@dataclass
class CharCNNConfig(InputConfig):
    """Word vectors computed from characters."""

    name: str = "char_cnn"
    byte_size: Width = 16
    """Width of byte embeddings."""
    filters: list[int] = field(default_factory=lambda: [10, 20, 30, 40, 50, 60, 70])
    """Number of convolution filters of width 1, 2, 3, ..."""
    longest: Width = 50
    """Maximum bytes per word; longer words are truncated."""

    def problems(self) -> Iterator[str]:
        if not self.filters or min(self.filters) < 1:
            yield (
                f"input.filters must be a list of positive numbers of convolutions; got {self.filters}. "
                "Try input.filters=[10,20,30]."
            )


class Highway(nn.Module):
    """y = t relu(W x) + (1 - t) x, with t = sigmoid(T x); initialized near the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.both = nn.Linear(width, 2 * width)
        nn.init.constant_(self.both.bias[width:], -2.0)

    def forward(self, x_UF: Tensor) -> Tensor:
        new_UF, gate_UF = self.both(x_UF).chunk(2, dim=-1)
        return torch.lerp(x_UF.to(new_UF.dtype), new_UF.relu(), gate_UF.sigmoid())


@plugin("input", "char_cnn", CharCNNConfig)
class CharCNN(Input):
    """Character convolutions, max-pooling, two highway layers and a projection."""

    def __init__(self, settings: CharCNNConfig, words: Sequence[str], width: int) -> None:
        super().__init__()
        self.width, self.longest, self.widest = width, settings.longest, len(settings.filters)
        self.letters = nn.Embedding(256, settings.byte_size)
        nn.init.uniform_(self.letters.weight, -0.1, 0.1)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(settings.byte_size, count, size) for size, count in enumerate(settings.filters, 1)
        )
        num_filters = sum(settings.filters)
        self.highways = nn.Sequential(*(Highway(num_filters) for _ in range(HIGHWAYS)))
        self.projection = nn.Linear(num_filters, width)
        self.spelling_VL: Tensor
        spelling_VL = self.spell(words)
        self.lengths_V = (spelling_VL != PADDING).sum(1)
        """Kept on the host, for plans."""
        self.register_buffer("spelling_VL", torch.from_numpy(spelling_VL), persistent=False)
        self.unseen: dict[str, int] = {}
        """Ids of OOV words."""
        self._forget()

    @classmethod
    def build(cls, settings: CharCNNConfig, sizes: InputSizes) -> "CharCNN":
        return cls(settings, sizes.vocabulary.words, sizes.width)

    def spell(self, words: Iterable[str]) -> NDArray[np.uint8]:
        """Return each word's bytes with markers, padded to the longest word and the widest convolution."""
        spellings = [bytes([BEGIN, *word.encode(errors="replace")[: self.longest], END]) for word in words]
        length = max([self.widest, *map(len, spellings)])
        joined = b"".join(spelling.ljust(length, bytes([PADDING])) for spelling in spellings)
        return np.frombuffer(joined, np.uint8).reshape(-1, length).copy()

    def plan(self, distinct_U: Tensor) -> int:
        """Return the length of the longest word."""
        return max(self.widest, int(self.lengths_V[distinct_U.numpy()].max()))

    def forward(self, words: Tensor, distinct: DistinctWords | None = None) -> Tensor:
        if distinct is None:
            return self._remembered(words)
        vectors_UE = self.vectors(self.spelling_VL[:, : distinct.plan].index_select(0, distinct.words_U))
        return F.embedding(distinct.inverse, vectors_UE)

    def vectors(self, spelling_UL: Tensor) -> Tensor:
        """Compute word vectors; padding beyond the widest convolution does not affect them."""
        letters_UCL = self.letters(spelling_UL.int()).transpose(1, 2)
        inside_UL = spelling_UL != PADDING
        inside_UL[:, : self.widest] = True
        largest = []
        for size, convolution in enumerate(self.convolutions, 1):
            # A window counts if its last byte is inside the word.
            outside_U1l = ~inside_UL[:, None, size - 1 :]
            largest.append(convolution(letters_UCL).masked_fill(outside_U1l, -torch.inf).amax(-1))
        hidden_UF = self.highways(torch.cat(largest, dim=-1).relu())
        vectors_UE: Tensor = self.projection(hidden_UF)
        return vectors_UE.to(self.letters.weight.dtype)

    # ---- evaluation: each word is computed once ------------------------------------------------------------------

    def train(self, mode: bool = True) -> "CharCNN":
        """Clear the cached vectors, because the weights may change."""
        self._forget()
        return super().train(mode)

    def _forget(self) -> None:
        self._known = self.letters.weight.new_empty(0, self.width)
        """Word vectors computed so far; NaN for other words."""

    def _remembered(self, words: Tensor) -> Tensor:
        distinct_U, inverse = torch.unique(words, return_inverse=True)
        if self.training or torch.is_grad_enabled():
            return F.embedding(inverse, self._vectors_of(distinct_U))
        if len(self._known) < len(self.spelling_VL):  # the first words since `train`, or new OOV words
            more = self.letters.weight.new_full((len(self.spelling_VL) - len(self._known), self.width), torch.nan)
            self._known = torch.cat([self._known.to(more.device), more])
        new_U = distinct_U[self._known[distinct_U, 0].isnan()]
        for first in range(0, len(new_U), WORDS_AT_ONCE):
            chunk_U = new_U[first : first + WORDS_AT_ONCE]
            self._known[chunk_U] = self._vectors_of(chunk_U)
        return F.embedding(words, self._known)

    def _vectors_of(self, words_U: Tensor) -> Tensor:
        return self.vectors(self.spelling_VL.index_select(0, words_U))

    def ids_of_unseen(self, words: Sequence[str]) -> list[int]:
        new = list(dict.fromkeys(word for word in words if word not in self.unseen))
        if new:
            added = torch.from_numpy(self.spell(new)).to(self.spelling_VL.device)
            first = len(self.lengths_V) + len(self.unseen)
            room, length = self.spelling_VL.shape
            # Grow the table geometrically; otherwise each new word would copy all of it.
            more = 0 if first + len(new) <= room else len(new) + room // 8
            self.spelling_VL = F.pad(self.spelling_VL, (0, max(0, added.shape[1] - length), 0, more))
            self.spelling_VL[first : first + len(new), : added.shape[1]] = added
            self.unseen.update((word, first + index) for index, word in enumerate(new))
        return [self.unseen[word] for word in words]
