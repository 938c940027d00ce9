"""Learn a SentencePiece model (unigram) from the words of the training text and their counts."""

import io
import re
from collections.abc import Callable, Iterable
from heapq import nsmallest
from itertools import islice
from typing import Any

import numpy as np

from lm.data.text.subwords import EOS_PIECE, UNK_PIECE, SubwordVocabulary, piece_names
from lm.data.text.vocabulary import EOS, UNK, Vocabulary
from lm.system.console import say
from lm.system.errors import UserError

MOST_WORDS = 1 << 18
"""Learn from this many distinct words, the most frequent ones; rarer words are hardly any text."""
SETTINGS: dict[str, Any] = {
    "model_type": "unigram",
    "input_format": "tsv",
    "normalization_rule_name": "identity",  # keep all characters, so that pieces give back the words
    "byte_fallback": True,
    "character_coverage": 0.9999,  # other characters are spelt in bytes
    "unk_id": UNK_PIECE,
    "eos_id": EOS_PIECE,
    "bos_id": -1,
    "pad_id": -1,
    "unk_piece": UNK,
    "eos_piece": EOS,
    "num_threads": 4,  # summation order, and so the model, depends on the number of threads
    "minloglevel": 2,
}

WordCounts = Callable[[], Iterable[tuple[str, int]]]
"""Returns the distinct words of training and their counts, in any order; called more than once."""


def learn_pieces(words: Vocabulary, *, size: int | None, counts: WordCounts) -> Vocabulary:
    """Learn a `size`-piece vocabulary (including `<unk>`, `</s>`) with training counts.

    Without a size, or without words, the word vocabulary is returned.
    """
    if size is None or set(words.words) == {UNK, EOS}:
        return words
    model = _learn_model(counts, size=size)
    word_list = "".join(f"{word}\n" for word in words.words).encode()
    names = tuple(piece_names(SubwordVocabulary((), words.counts, model, word_list).processor))
    uncounted = SubwordVocabulary(names, np.zeros(size, np.int64), model, word_list)
    pieces = Vocabulary.from_counts(zip(names, _count_pieces(counts, uncounted), strict=True), min_count=0)
    return SubwordVocabulary(pieces.words, pieces.counts, model, word_list)


def _learn_model(counts: WordCounts, *, size: int) -> bytes:
    from sentencepiece import SentencePieceTrainer

    seen = ((word, count) for word, count in counts() if count and word not in (UNK, EOS) and "\t" not in word)
    chosen = nsmallest(MOST_WORDS, seen, key=lambda item: (-item[1], item[0]))
    say(f"learning {size:,} pieces from {len(chosen):,} distinct words, with SentencePiece; this can take a minute")
    written = io.BytesIO()
    lines = (f"{word}\t{count}" for word, count in chosen)
    try:
        SentencePieceTrainer.train(sentence_iterator=lines, model_writer=written, vocab_size=size, **SETTINGS)
    except RuntimeError as error:
        raise _explain(str(error), size=size) or error from None
    return written.getvalue()


def _explain(message: str, *, size: int) -> UserError | None:
    """Translate SentencePiece's complaint about a size that does not suit the text."""
    if too_high := re.search(r"too high .* <= (\d+)", message):
        limit, rule = too_high[1], f"at most {too_high[1]} for this text"
    elif too_low := re.search(r"required_chars. \d+ vs (\d+)", message):
        limit, rule = too_low[1], f"at least {too_low[1]}, for its characters, the 256 bytes and the marks"
    else:
        return None
    return UserError(f"data.vocab_size must be {rule}; got {size}. Try data.vocab_size={limit}")


def _count_pieces(counts: WordCounts, vocabulary: SubwordVocabulary) -> list[int]:
    """Occurrences of each piece in the text."""
    items, totals = iter(counts()), np.zeros(len(vocabulary))
    while batch := list(islice(items, 1 << 16)):
        spelling = vocabulary.spelling(word for word, _ in batch)
        count_W = np.array([count for _, count in batch], np.float64)
        totals += np.bincount(spelling.ids, np.repeat(count_W, spelling.lengths_W), len(vocabulary))
    return [int(total) for total in totals]
