"""Subwords: SentencePiece (unigram) pieces of the corpus's words.

Pieces never span words, so the spelling of a word does not depend on its context. A text is encoded by spelling each
distinct word once, and the model is trained on words and their counts. Characters that no piece covers are spelled in
bytes (`<0x41>`), so `<unk>` occurs only if the text contains it.

Shapes: W distinct words, N words in a text, P pieces.
"""

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from heapq import nsmallest
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lm.data.text.vocabulary import EOS, UNK, Ids, Vocabulary
from lm.system.console import say
from lm.system.errors import UserError

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

BATCH = 1 << 16
"""Words spelled per call."""

WordCounts = Callable[[], Iterable[tuple[str, int]]]
"""Returns the distinct training words and their counts; called more than once."""


class SpelledText(NamedTuple):
    """A text in pieces."""

    ids_P: Ids
    marks_P: npt.NDArray[np.uint8]
    """KNOWN and WORD_END of each piece."""
    ends_N: npt.NDArray[np.int64]
    """Number of pieces up to the end of each word."""


class Spelling(NamedTuple):
    """The pieces of numbered words."""

    ids: Ids
    """Pieces of all words, concatenated."""
    lengths_W: npt.NDArray[np.int64]
    starts_W: npt.NDArray[np.int64]
    known_W: npt.NDArray[np.bool_]
    """Whether the word is in the word vocabulary."""

    def take(self, numbers_N: npt.NDArray[Any]) -> SpelledText:
        """Spell the text with these word numbers."""
        lengths_N = self.lengths_W.take(numbers_N)
        ends_N = np.cumsum(lengths_N)
        # The offset of a piece from the start of its word is the same in the text as in `ids`.
        shifts_N = self.starts_W.take(numbers_N) - (ends_N - lengths_N)
        ids_P = self.ids.take(np.arange(lengths_N.sum()) + np.repeat(shifts_N, lengths_N))
        marks_P = np.repeat(KNOWN * self.known_W.take(numbers_N).astype(np.uint8), lengths_N)
        marks_P[ends_N - 1] += WORD_END
        return SpelledText(ids_P, marks_P, ends_N)


@dataclass(frozen=True, eq=False)
class SubwordVocabulary(Vocabulary):
    """Pieces by id, sorted by decreasing training count; any word can be spelled with them."""

    model: bytes = field(repr=False)
    """SentencePiece's serialized model."""
    word_list: bytes = field(repr=False)
    """The word vocabulary of the same text and `data.min_count`, a word per line; perplexities are compared on it."""

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> "SubwordVocabulary":
        """Inverse of `files`; raises UserError if model and vocabulary do not match."""
        pieces = Vocabulary.from_bytes(files["vocab.tsv"])
        vocabulary = cls(pieces.words, pieces.counts, files[MODEL_FILE], files[WORDS_FILE])
        if sorted(piece_names(vocabulary.processor)) != sorted(pieces.words):
            raise UserError(f"{MODEL_FILE} must have the pieces of the vocabulary; it has others.")
        return vocabulary

    def files(self) -> dict[str, bytes]:
        return {**super().files(), MODEL_FILE: self.model, WORDS_FILE: self.word_list}

    def encode(self, words: Iterable[str]) -> npt.NDArray[np.int64]:
        """Encode words as piece ids, usually more than one per word."""
        numbers: dict[str, int] = {}
        numbers_N = np.fromiter((numbers.setdefault(word, len(numbers)) for word in words), np.int64)
        return self.spelling(numbers).take(numbers_N).ids_P.astype(np.int64)

    def knows(self, word: str) -> bool:
        return self.unk_id not in self.encode([word])

    def spelling(self, words: Iterable[str]) -> Spelling:
        """Spell each word with at least one piece, and exactly one for `<unk>` and `</s>`."""
        marks = {UNK: [UNK_PIECE], EOS: [EOS_PIECE]}
        words, columns = iter(words), [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.bool_))]
        while batch := list(islice(words, BATCH)):
            # SentencePiece has no pieces for a word that consists of its prefix ▁.
            spelled = [
                marks.get(w) or p or [UNK_PIECE] for w, p in zip(batch, self.processor.encode(batch), strict=True)
            ]
            lengths_W = np.fromiter(map(len, spelled), np.int64, len(batch))
            pieces = np.fromiter(chain.from_iterable(spelled), np.int64, lengths_W.sum())
            known_W = np.fromiter((word in self.known_words for word in batch), np.bool_, len(batch))
            columns.append((pieces, lengths_W, known_W))
        pieces, lengths_W, known_W = map(np.concatenate, zip(*columns, strict=True))
        return Spelling(self._id_of_piece[pieces], lengths_W, np.cumsum(lengths_W) - lengths_W, known_W)

    @cached_property
    def known_words(self) -> frozenset[str]:
        """Built on first use, because training does not need it."""
        return frozenset(self.word_list.decode().split("\n")) - {"", UNK}

    @cached_property
    def processor(self) -> Any:
        """SentencePiece's object for the model."""
        from sentencepiece import SentencePieceProcessor  # imported only for subwords

        try:
            return SentencePieceProcessor(model_proto=self.model)
        except RuntimeError:
            raise UserError(f"{MODEL_FILE} must be a SentencePiece model; it cannot be read.") from None

    @cached_property
    def _id_of_piece(self) -> Ids:
        return np.array([self.ids[name] for name in piece_names(self.processor)], self.dtype)


def open_vocabulary(files: Mapping[str, bytes]) -> Vocabulary:
    """Load a vocabulary of words or pieces from its `files`."""
    return SubwordVocabulary.from_files(files) if MODEL_FILE in files else Vocabulary.from_bytes(files["vocab.tsv"])


def piece_names(processor: Any) -> Iterator[str]:
    """List the pieces by the model's ids."""
    return map(processor.id_to_piece, range(processor.get_piece_size()))


# ---- training the model ----------------------------------------------------------------------------------------


def learn_pieces(words: Vocabulary, size: int, counts: WordCounts) -> SubwordVocabulary:
    """Train a SentencePiece model; return its `size` pieces, `<unk>` and `</s>` included, with training counts."""
    model = _learn_model(counts, size=size)
    word_list = "".join(f"{word}\n" for word in words.words).encode()
    names = tuple(piece_names(SubwordVocabulary((), words.counts, model, word_list).processor))
    uncounted = SubwordVocabulary(names, np.zeros(size, np.int64), model, word_list)
    items, totals = iter(counts()), np.zeros(size)
    while batch := list(islice(items, BATCH)):
        spelling = uncounted.spelling(word for word, _ in batch)
        count_W = np.array([count for _, count in batch], np.float64)
        totals += np.bincount(spelling.ids, np.repeat(count_W, spelling.lengths_W), size)
    pieces = Vocabulary.from_counts(zip(names, map(int, totals), strict=True), min_count=0)
    return SubwordVocabulary(pieces.words, pieces.counts, model, word_list)


def _learn_model(counts: WordCounts, *, size: int) -> bytes:
    from sentencepiece import SentencePieceTrainer

    seen = ((word, count) for word, count in counts() if count and word not in (UNK, EOS) and "\t" not in word)
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
