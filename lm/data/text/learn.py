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
"""A model is learnt from so many distinct words, the most frequent ones; what is rarer is hardly any text."""
SETTINGS: dict[str, Any] = {
    "model_type": "unigram",
    "input_format": "tsv",
    "normalization_rule_name": "identity",  # the text's own characters, so that pieces give back the words
    "byte_fallback": True,
    "character_coverage": 0.9999,  # the others are spelt in bytes
    "unk_id": UNK_PIECE,
    "eos_id": EOS_PIECE,
    "bos_id": -1,
    "pad_id": -1,
    "unk_piece": UNK,
    "eos_piece": EOS,
    "num_threads": 4,  # sums are taken by thread, so another number would give another model
    "minloglevel": 2,
}

WordCounts = Callable[[], Iterable[tuple[str, int]]]
"""Gives the distinct words of training and their counts, in any order, as often as it is called."""


def learn_pieces(words: Vocabulary, *, size: int | None, counts: WordCounts) -> Vocabulary:
    """So many pieces, the marks among them, with their counts in the training text, in the place of its words.

    Without a size, or where there are no words, these stay what they are.
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
        raise _told(str(error), size=size) or error from None
    return written.getvalue()


def _told(message: str, *, size: int) -> UserError | None:
    """What SentencePiece says of a size that does not suit the text, in our words."""
    if too_high := re.search(r"too high .* <= (\d+)", message):
        limit, rule = too_high[1], f"at most {too_high[1]}: this text gives no more"
    elif too_low := re.search(r"required_chars. \d+ vs (\d+)", message):
        limit, rule = too_low[1], f"at least {too_low[1]}, which its characters, the 256 bytes and the marks take"
    else:
        return None
    return UserError(f"data.vocab_size must be {rule}; got {size}. Try data.vocab_size={limit}")


def _count_pieces(counts: WordCounts, vocabulary: SubwordVocabulary) -> list[int]:
    """How often each piece stands in the text."""
    items, totals = iter(counts()), np.zeros(len(vocabulary))
    while batch := list(islice(items, 1 << 16)):
        spelling = vocabulary.spelling(word for word, _ in batch)
        count_W = np.array([count for _, count in batch], np.float64)
        totals += np.bincount(spelling.ids, np.repeat(count_W, spelling.lengths_W), len(vocabulary))
    return [int(total) for total in totals]
