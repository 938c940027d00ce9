"""The words of a corpus, their ids and their training counts.

Ids are sorted by decreasing training count, which every output layer with clusters relies on. Ties are sorted by the
word, so the same text always gives the same ids. The two marks are sorted like words, by their true counts.
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
"""Replaces every word outside the vocabulary; a literal `<unk>` in the text is the same mark."""
EOS = "</s>"
"""Ends a sentence; a literal `</s>` in the text is the same mark."""

Ids = npt.NDArray[Any]
"""Word ids: uint16 or uint32 on disk, int64 from `Vocabulary.encode`."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Words by id, sorted by decreasing training count, including both marks; no word contains a line feed."""

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
        """Keep the words seen at least `min_count` times, of them the `max_words` most frequent; others are `<unk>`.

        A `lexicon` names the words instead, and `min_count` does not count; words that training lacks have count 0.
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
        return cls(tuple(words[number] for number in order.tolist()), word_counts[order])

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def ids(self) -> dict[str, int]:
        """Word to id; built on first use, because training does not need it."""
        return {word: number for number, word in enumerate(self.words)}

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
        """Whether the word is encoded as something else than `<unk>`."""
        return self.ids.get(word, self.unk_id) != self.unk_id

    def decode(self, ids: Iterable[int]) -> list[str]:
        return [self.words[number] for number in ids]

    @cached_property
    def hash(self) -> str:
        """sha256 of the serialised vocabulary; two runs may share weights only if it is the same."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        lines = (f"{word}\t{count}\n" for word, count in zip(self.words, self.counts.tolist(), strict=True))
        return "".join(lines).encode()

    def files(self) -> dict[str, bytes]:
        """Its files in a prepared folder and in a checkpoint, by name."""
        return {"vocab.tsv": self.to_bytes()}

    @classmethod
    def from_bytes(cls, data: bytes) -> "Vocabulary":
        """The reverse of `to_bytes`; UserError for anything else."""
        try:
            *lines, rest = data.decode().split("\n")
            # Split at the last tab: a word may contain one.
            pairs = [line.rsplit("\t", 1) for line in lines]
            words = tuple(word for word, _ in pairs)
            counts = np.array([int(count) for _, count in pairs], np.int64)
        except (ValueError, OverflowError):
            raise UserError("the vocabulary must hold lines of a word, a tab and its count") from None
        distinct = set(words)
        if rest or len(distinct) < len(words) or not {UNK, EOS} <= distinct or (np.diff(counts) > 0).any():
            raise UserError(
                f"the vocabulary must hold {UNK} and {EOS}, every word once, and counts that never increase"
            )
        return cls(words, counts)

    def unigram_perplexity(self, counts: npt.NDArray[np.int64]) -> float:
        """Perplexity of a split, given its count of each word, under training's unigram distribution.

        A word that training lacks (`<unk>`, or a word of `data=zipf`) counts as seen once.
        """
        seen = np.maximum(self.counts, 1).astype(np.float64)
        log_probability = np.log(seen) - math.log(seen.sum())
        return math.exp(-float(counts @ log_probability) / max(1, int(counts.sum())))
