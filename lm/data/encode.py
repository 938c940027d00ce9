"""Text to ids: count the training words, then replace every word by its id.

All text corpora go through `read_text`. The plain Python here is the definition. The scanner (`fast_encode.py`) gives
the same ids many times faster for the rules it supports, but takes longer to start than a small text takes here. For
subwords, both find the words first and then spell each distinct one (`subwords.py`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lm.data.text.learn import learn_pieces
from lm.data.text.reading import Part, Text, total_size
from lm.data.text.subwords import SubwordVocabulary, number_words
from lm.data.text.vocabulary import EOS, UNK, Vocabulary, count_words
from lm.data.write import Block, Content
from lm.system.console import Progress, counted, say
from lm.system.errors import UserError

SMALL = 4 << 20
"""Bytes up to which pure Python is faster than starting the scanner."""

_BLOCK = 1 << 18


class Sentence(NamedTuple):
    """Words, followed by `</s>` unless there are none, and how much text they are."""

    words: list[str]
    characters: int
    size: int
    """Bytes."""
    ends_part: bool = False


def read_text(text: Text, *, min_count: int, scratch: Path, num_pieces: int | None = None, **limits: Any) -> Content:
    """The vocabulary of the training split (words, or `num_pieces` subwords), and all splits encoded with it.

    `scratch` is a folder for temporary files; `limits` are those of `Vocabulary.from_counts`.
    """
    if _for_scanner(text):
        from lm.data import fast_encode

        content = fast_encode.read_text(text, min_count=min_count, scratch=scratch, num_pieces=num_pieces, **limits)
    else:
        content = read_plainly(text, min_count=min_count, num_pieces=num_pieces, **limits)
    vocabulary = content.vocabulary
    known = vocabulary.counts.sum() - vocabulary.counts[[vocabulary.unk_id, vocabulary.eos_id]].sum()
    if limits.get("lexicon") and not known:
        raise UserError("data.vocabulary holds no word of the training text. Is it of another language or case?")
    if set(vocabulary.words) == {UNK, EOS} and vocabulary.counts.any():
        raise UserError(
            f"data.min_count={min_count} leaves no word: no word of the training text is that frequent. Try a lower one"
        )
    return Content(vocabulary, _never_empty(content.splits, text=text), text.facts)


def encode_text(text: Text, *, vocabulary: Vocabulary, scratch: Path) -> Mapping[str, Iterator[Block]]:
    """Every split, encoded with a given vocabulary."""
    if _for_scanner(text):
        from lm.data import fast_encode

        splits: Mapping[str, Iterable[Block]] = fast_encode.encode_text(text, vocabulary=vocabulary, scratch=scratch)
    else:
        splits = encode_plainly(text, vocabulary=vocabulary)
    return _never_empty(splits, text=text)


def _for_scanner(text: Text) -> bool:
    """Whether the text is large enough for the scanner, and the scanner supports its rule."""
    left = SMALL
    for part in (part for parts in text.splits.values() for part in parts):
        # The first chunk may be shorter than requested; two of them are not.
        left -= sum(len(chunk.data) for chunk in islice(part.chunks(left + 1), 2))
        if left < 0:
            from lm.data import fast_encode

            return fast_encode.supports(text.rule)
    return False


def _never_empty(splits: Mapping[str, Iterable[Block]], *, text: Text) -> dict[str, Iterator[Block]]:
    """The same blocks; raises for a split without words, naming its files."""

    def checked(split: str, parts: Sequence[Part]) -> Iterator[Block]:
        num_words = 0
        for block in splits[split]:
            num_words += block.words
            yield block
        if not num_words:
            source = repr(parts[0].name) if len(parts) == 1 else f"{len(parts)} files from {parts[0].name!r} on"
            raise UserError(f"the {split} split must hold at least one word; got none from {source}. Put text there")

    return {split: checked(split, parts) for split, parts in text.splits.items()}


# ---- pure Python -----------------------------------------------------------------------------------------------


def read_plainly(text: Text, *, min_count: int, num_pieces: int | None = None, **limits: Any) -> Content:
    """Count the training split now; encode each split when it is iterated over."""
    with Progress(total_size(text.splits["train"]), label="train: counting", unit="B") as bar:

        def sentences() -> Iterator[list[str]]:
            for sentence in read_sentences(text, "train"):
                if sentence.words:
                    yield sentence.words
                bar.advance(sentence.size)

        counts = count_words(sentences())
    words = Vocabulary.from_counts(counts.items(), min_count=min_count, **limits)
    tell_of_unknown(counts.get(UNK, 0), words, min_count=min_count)
    vocabulary = learn_pieces(words, size=num_pieces, counts=counts.items)
    return Content(vocabulary, encode_plainly(text, vocabulary=vocabulary))


def tell_of_unknown(written: int, words: Vocabulary, *, min_count: int) -> None:
    """Say what happens to a text that writes `<unk>` itself, as Penn Treebank does, where more words become it."""
    more = int(words.counts[words.unk_id]) - written
    if written and more:
        say(
            f"note: the training text writes <unk> itself, {counted(written, 'time')}. data.min_count={min_count}, or "
            f"another limit, makes {more:,} more of its words the same <unk>; data.min_count=1 keeps the text's own "
            "vocabulary."
        )


def encode_plainly(text: Text, *, vocabulary: Vocabulary) -> dict[str, Iterator[Block]]:
    return {split: _encode(read_sentences(text, split), vocabulary=vocabulary) for split in text.splits}


def read_sentences(text: Text, split: str) -> Iterator[Sentence]:
    """The sentences of a split in order; those without words still count as text."""
    lines = (line for part in text.splits[split] for line in _lines(text, part))
    return lines if text.sentence_words is None else _regroup(lines, num_words=text.sentence_words)


def _lines(text: Text, part: Part) -> Iterator[Sentence]:
    for offset, line in part.lines():
        if text.rule.skip_markup and line.startswith(b"<"):
            yield Sentence([], 0, len(line))
        else:
            decoded = text.decode(line, name=part.name, offset=offset)
            yield Sentence(text.rule.words(decoded), len(decoded), len(line))
    yield Sentence([], 0, 0, ends_part=True)


def _regroup(lines: Iterable[Sentence], *, num_words: int) -> Iterator[Sentence]:
    """Sentences of `num_words` words across lines; the last one may be shorter."""
    words: list[str] = []
    for line in lines:
        words += line.words
        whole = len(words) // num_words * num_words
        for start in range(0, whole, num_words):
            yield Sentence(words[start : start + num_words], 0, 0)
        yield Sentence([], line.characters, line.size)
        del words[:whole]
    yield Sentence(words, 0, 0)


def _encode(sentences: Iterable[Sentence], *, vocabulary: Vocabulary) -> Iterator[Block]:
    """The ids of the sentences, `</s>` after each that has words, in blocks of bounded size."""
    lookup, unk = vocabulary.ids.get, vocabulary.unk_id
    tokens: list[str] = []
    part_ends: list[int] = []
    words = characters = size = 0

    def block() -> Block:
        if isinstance(vocabulary, SubwordVocabulary):
            numbers, distinct = number_words(tokens)
            return Block(numbers, words, characters, size, part_ends).spelt(vocabulary.spelling(distinct))
        ids = np.array(list(map(lookup, tokens, repeat(unk))), vocabulary.dtype)
        return Block(ids, words, characters, size, part_ends)

    for sentence in sentences:
        if sentence.words:
            tokens += [*sentence.words, EOS]
        words += len(sentence.words)
        characters += sentence.characters
        size += sentence.size
        if sentence.ends_part:
            part_ends.append(len(tokens))
        if len(tokens) >= _BLOCK:
            yield block()
            tokens, part_ends, words, characters, size = [], [], 0, 0, 0
    yield block()
