"""The words of a corpus, their ids and their training counts.

Ids are sorted by decreasing training count, which every output layer with clusters relies on. Ties are sorted by the
word, so the same text always gives the same ids. `<unk>` and `</s>` are sorted like words, by their true counts.
"""

import hashlib
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from lm.system.errors import UserError

UNK = "<unk>"
"""Replaces every word outside the vocabulary; a literal `<unk>` in the text is the same token."""
EOS = "</s>"
"""Ends a sentence; a literal `</s>` in the text is the same token."""

Ids = npt.NDArray[Any]
"""Word ids: uint16 or uint32 on disk, int64 from `Vocabulary.encode`."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Words by id, sorted by decreasing training count, with `<unk>` and `</s>`; no word contains a line feed."""

    words: tuple[str, ...]
    counts: npt.NDArray[np.int64]
    """Occurrences in the training split; `<unk>` counts the words it replaces."""

    @classmethod
    def from_counts(
        cls,
        counts: Iterable[tuple[str, int]],
        *,
        min_count: int,
        max_words: int | None = None,
        lexicon: Collection[str] | None = None,
    ) -> "Vocabulary":
        """Keep the words that occur at least `min_count` times, at most `max_words` of them; the rest is `<unk>`.

        A `lexicon` replaces `min_count`: exactly its words are kept, with count 0 if training lacks them.
        """
        kept = dict.fromkeys([UNK, EOS, *(lexicon or ())], 0)
        for word, count in counts:
            is_kept = word in kept if lexicon is not None else count >= min_count or word == EOS
            word = word if is_kept else UNK
            kept[word] = kept.get(word, 0) + count
        if max_words is not None:
            by_count = sorted(kept.keys() - {UNK, EOS}, key=lambda word: (-kept[word], word))
            for word in by_count[max_words:]:
                kept[UNK] += kept.pop(word)
        words = sorted(kept)
        word_counts = np.fromiter((kept[word] for word in words), np.int64)
        order = np.argsort(-word_counts, kind="stable")
        return cls(tuple(words[index] for index in order.tolist()), word_counts[order])

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def ids(self) -> dict[str, int]:
        """Word to id; built on first use, because training does not need it."""
        return {word: id_ for id_, word in enumerate(self.words)}

    @cached_property
    def unk_id(self) -> int:
        return self.words.index(UNK)

    @cached_property
    def eos_id(self) -> int:
        return self.words.index(EOS)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Little-endian uint16, or uint32 for a large vocabulary."""
        return np.dtype("<u2" if len(self) <= 1 << 16 else "<u4")

    def encode(self, words: Iterable[str]) -> npt.NDArray[np.int64]:
        lookup, unk = self.ids.get, self.unk_id
        return np.fromiter((lookup(word, unk) for word in words), np.int64)

    def knows(self, word: str) -> bool:
        """Whether the word is not encoded as `<unk>`."""
        return self.ids.get(word, self.unk_id) != self.unk_id

    def decode(self, ids: Iterable[int]) -> list[str]:
        return [self.words[id_] for id_ in ids]

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the serialized vocabulary; runs can share weights only if it matches."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        lines = (f"{word}\t{count}\n" for word, count in zip(self.words, self.counts.tolist(), strict=True))
        return "".join(lines).encode()

    def files(self) -> dict[str, bytes]:
        """Files of a prepared corpus and of a checkpoint, by name."""
        return {"vocab.tsv": self.to_bytes()}

    @classmethod
    def from_bytes(cls, data: bytes) -> "Vocabulary":
        """Inverse of `to_bytes`; raises UserError for invalid bytes."""
        try:
            *lines, rest = data.decode().split("\n")
            # Split at the last tab: a word may contain one.
            pairs = [line.rsplit("\t", 1) for line in lines]
            words = tuple(word for word, _ in pairs)
            counts = np.array([int(count) for _, count in pairs], np.int64)
        except (ValueError, OverflowError):
            raise UserError("The vocabulary must consist of lines with a word, a tab and its count.") from None
        distinct = set(words)
        if rest or len(distinct) < len(words) or not {UNK, EOS} <= distinct or (np.diff(counts) > 0).any():
            raise UserError(f"The vocabulary must contain {UNK} and {EOS}, each word once, by decreasing count.")
        return cls(words, counts)

    def unigram_perplexity(self, counts: npt.NDArray[np.int64]) -> float:
        """Return the perplexity of these word counts under the training unigram distribution.

        Words unseen in training count as seen once.
        """
        seen = np.maximum(self.counts, 1).astype(np.float64)
        log_probability = np.log(seen) - math.log(seen.sum())
        return math.exp(-float(counts @ log_probability) / max(1, int(counts.sum())))
