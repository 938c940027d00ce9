"""The words or subwords of a corpus, their ids and their training counts.

Ids are sorted by decreasing training count, which every output layer with clusters relies on. Ties are sorted by the
word, so the same text always gives the same ids. `<unk>` and `</s>` are sorted like words, by their true counts.
"""

import hashlib
import io
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from heapq import nsmallest
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lm.system.console import say
from lm.system.errors import UserError

UNK = "<unk>"
"""Replaces every word outside the vocabulary; a literal `<unk>` in the text is the same token."""
EOS = "</s>"
"""Ends a sentence; a literal `</s>` in the text is the same token."""

Ids = npt.NDArray[Any]
"""Word ids: uint16 or uint32 on disk, int64 from `Vocabulary.encode`."""


@dataclass(frozen=True)
class VocabularyRule:
    """Which words of the training text a vocabulary keeps; the rest is `<unk>`."""

    min_count: int = 1
    """Keep words that occur at least this often."""
    max_words: int | None = None
    """Keep at most this many of them, the most frequent ones."""
    lexicon: Collection[str] | None = None
    """Keep exactly these words instead, with count 0 if training lacks them."""
    num_pieces: int | None = None
    """Number of subwords to learn from the text; None for words."""


ALL_WORDS = VocabularyRule()


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Words by id, sorted by decreasing training count, with `<unk>` and `</s>`; no word contains a line feed."""

    words: tuple[str, ...]
    counts: npt.NDArray[np.int64]
    """Occurrences in the training split; `<unk>` counts the words it replaces."""

    @classmethod
    def from_counts(cls, counts: Iterable[tuple[str, int]], rule: VocabularyRule = ALL_WORDS) -> "Vocabulary":
        """Build a vocabulary of words from their counts."""
        kept = dict.fromkeys([UNK, EOS, *(rule.lexicon or ())], 0)
        for word, count in counts:
            is_kept = word in kept if rule.lexicon is not None else count >= rule.min_count or word == EOS
            word = word if is_kept else UNK
            kept[word] = kept.get(word, 0) + count
        if rule.max_words is not None:
            by_count = sorted(kept.keys() - {UNK, EOS}, key=lambda word: (-kept[word], word))
            for word in by_count[rule.max_words :]:
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
        """Inverse of `to_bytes`; callers compare hashes."""
        pairs = [line.rsplit("\t", 1) for line in data.decode().split("\n")[:-1]]  # a word may contain a tab
        return cls(tuple(word for word, _ in pairs), np.array([int(count) for _, count in pairs], np.int64))

    def unigram_perplexity(self, counts: npt.NDArray[np.int64]) -> float:
        """Return the perplexity of these word counts under the training unigram distribution.

        Words unseen in training count as seen once.
        """
        seen = np.maximum(self.counts, 1).astype(np.float64)
        log_probability = np.log(seen) - math.log(seen.sum())
        return math.exp(-float(counts @ log_probability) / max(1, int(counts.sum())))


# ---- subwords --------------------------------------------------------------------------------------------------------
#
# SentencePiece (unigram) pieces of the corpus's words. Pieces never span words, so the spelling of a word does not
# depend on its context. A text is encoded by spelling each distinct word once, and the model is trained on words and
# their counts. Characters that no piece covers are spelled in bytes (`<0x41>`), so `<unk>` occurs only if the text
# contains it.
#
# Shapes: W distinct words, N words in a text, P pieces.


MODEL_FILE, WORDS_FILE = "sentencepiece.model", "words.txt"
"""Files stored with the vocabulary in prepared corpora and checkpoints."""
UNK_PIECE, EOS_PIECE = 0, 1
"""Ids of `<unk>` and `</s>` inside every SentencePiece model."""
KNOWN, WORD_END = 1, 2
"""Token flags: part of a word in the word vocabulary; last piece of a word."""

MAX_WORDS = 1 << 18
"""Number of most frequent distinct words to learn from; rarer ones are a tiny fraction of the text."""
SETTINGS: dict[str, Any] = {
    "model_type": "unigram",
    "input_format": "tsv",
    "normalization_rule_name": "identity",  # keep all characters, so that pieces give back the words
    "byte_fallback": True,
    "character_coverage": 0.9999,  # other characters are spelled in bytes
    "unk_id": UNK_PIECE,
    "eos_id": EOS_PIECE,
    "bos_id": -1,
    "pad_id": -1,
    "unk_piece": UNK,
    "eos_piece": EOS,
    "num_threads": 4,  # summation order, and so the model, depends on the number of threads
    "minloglevel": 2,
}


class Spelling(NamedTuple):
    """The pieces of numbered words."""

    ids: Ids
    """Pieces of all words, concatenated."""
    lengths_W: npt.NDArray[np.int64]
    starts_W: npt.NDArray[np.int64]
    known_W: npt.NDArray[np.bool_]
    """Whether the word is in the word vocabulary."""

    def take(self, numbers_N: npt.NDArray[Any]) -> tuple[Ids, npt.NDArray[np.uint8]]:
        """Spell the text with these word numbers; return its P pieces, and KNOWN and WORD_END of each."""
        lengths_N = self.lengths_W.take(numbers_N)
        ends_N = np.cumsum(lengths_N)
        # The offset of a piece from the start of its word is the same in the text as in `ids`.
        shifts_N = self.starts_W.take(numbers_N) - (ends_N - lengths_N)
        ids_P = self.ids.take(np.arange(lengths_N.sum()) + np.repeat(shifts_N, lengths_N))
        marks_P = np.repeat(KNOWN * self.known_W.take(numbers_N).astype(np.uint8), lengths_N)
        marks_P[ends_N - 1] += WORD_END
        return ids_P, marks_P


@dataclass(frozen=True, eq=False)
class SubwordVocabulary(Vocabulary):
    """Pieces by id, sorted by decreasing training count; any word can be spelled with them."""

    model: bytes = field(repr=False)
    """SentencePiece's serialized model."""
    word_list: bytes = field(repr=False)
    """The word vocabulary of the same text and `data.min_count`, a word per line; perplexities are compared on it."""

    def files(self) -> dict[str, bytes]:
        return {**super().files(), MODEL_FILE: self.model, WORDS_FILE: self.word_list}

    def encode(self, words: Iterable[str]) -> npt.NDArray[np.int64]:
        """Encode words as piece ids, usually more than one per word."""
        numbers: dict[str, int] = {}
        numbers_N = np.fromiter((numbers.setdefault(word, len(numbers)) for word in words), np.int64)
        return self.spelling(numbers).take(numbers_N)[0].astype(np.int64)

    def knows(self, word: str) -> bool:
        return self.unk_id not in self.encode([word])

    def spelling(self, words: Iterable[str]) -> Spelling:
        """Spell each word with at least one piece, and exactly one for `<unk>` and `</s>`."""
        marks = {UNK: [UNK_PIECE], EOS: [EOS_PIECE]}
        words = list(words)
        # SentencePiece has no pieces for a word that consists of its prefix ▁.
        spelled = [marks.get(w) or p or [UNK_PIECE] for w, p in zip(words, self.processor.encode(words), strict=True)]
        lengths_W = np.fromiter(map(len, spelled), np.int64, len(words))
        pieces = np.fromiter(chain.from_iterable(spelled), np.int64, lengths_W.sum())
        known_W = np.fromiter((word in self.known_words for word in words), np.bool_, len(words))
        return Spelling(self._id_of_piece[pieces], lengths_W, np.cumsum(lengths_W) - lengths_W, known_W)

    @cached_property
    def known_words(self) -> frozenset[str]:
        """Built on first use, because training does not need it."""
        return frozenset(self.word_list.decode().split("\n")) - {"", UNK}

    @cached_property
    def processor(self) -> Any:
        """SentencePiece's object for the model."""
        from sentencepiece import SentencePieceProcessor  # imported only for subwords

        return SentencePieceProcessor(model_proto=self.model)

    @cached_property
    def _id_of_piece(self) -> Ids:
        return np.array([self.ids[name] for name in piece_names(self.processor)], self.dtype)


def open_vocabulary(files: Mapping[str, bytes]) -> Vocabulary:
    """Load a vocabulary of words or pieces from its `files`."""
    listed = Vocabulary.from_bytes(files["vocab.tsv"])
    if MODEL_FILE not in files:
        return listed
    return SubwordVocabulary(listed.words, listed.counts, files[MODEL_FILE], files[WORDS_FILE])


def piece_names(processor: Any) -> Iterator[str]:
    """List the pieces by the model's ids."""
    return map(processor.id_to_piece, range(processor.get_piece_size()))


# ---- training the model ----------------------------------------------------------------------------------------


def learn_pieces(words: Vocabulary, size: int, counts: dict[str, int]) -> SubwordVocabulary:
    """Train a SentencePiece model; return its `size` pieces, `<unk>` and `</s>` included, with training counts."""
    model = _learn_model(counts, size=size)
    word_list = "".join(f"{word}\n" for word in words.words).encode()
    names = tuple(piece_names(SubwordVocabulary((), words.counts, model, word_list).processor))
    uncounted = SubwordVocabulary(names, np.zeros(size, np.int64), model, word_list)
    spelling = uncounted.spelling(counts)
    totals = np.bincount(spelling.ids, np.repeat([*map(float, counts.values())], spelling.lengths_W), size)
    pieces = Vocabulary.from_counts(zip(names, map(int, totals), strict=True), VocabularyRule(min_count=0))
    return SubwordVocabulary(pieces.words, pieces.counts, model, word_list)


def _learn_model(counts: dict[str, int], *, size: int) -> bytes:
    from sentencepiece import SentencePieceTrainer

    seen = ((word, count) for word, count in counts.items() if count and word not in (UNK, EOS) and "\t" not in word)
    chosen = nsmallest(MAX_WORDS, seen, key=lambda item: (-item[1], item[0]))
    say(f"learning {size:,} pieces from {len(chosen):,} distinct words with SentencePiece; this can take a minute")
    model = io.BytesIO()
    lines = (f"{word}\t{count}" for word, count in chosen)
    try:
        SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, vocab_size=size, **SETTINGS)
    except RuntimeError as error:
        if too_high := re.search(r"too high .* <= (\d+)", str(error)):
            limit, rule = too_high[1], f"at most {too_high[1]} for this text"
        elif too_low := re.search(r"required_chars. \d+ vs (\d+)", str(error)):
            limit, rule = too_low[1], f"at least {too_low[1]}: its characters, the 256 bytes, <unk> and </s>"
        else:
            raise
        raise UserError(f"data.vocab_size must be {rule}; got {size}. Try data.vocab_size={limit}.") from None
    return model.getvalue()
