"""The compiled scanner finds the tokens of the plain definition, for any text, wherever chunks are cut."""

import io
import re
import time
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lm.data import encode
from lm.data.encode import Scanned, in_order, kinds_of, scan_split
from lm.data.source import TextFile
from lm.data.text.tokenize import SPACES, WHITESPACE, WORD_PATTERN, PieceJoiner, TokenRule
from lm.data.text.vocabulary import (
    ALL_WORDS,
    EOS,
    UNK,
    WORD_END,
    SubwordVocabulary,
    Vocabulary,
    VocabularyRule,
    learn_pieces,
)
from lm.data.word_table import JOINER, LINE_END, SINGLE, SPACE, WORD
from lm.system.errors import UserError
from tests.helpers.plain_encode import plain_text
from tests.helpers.subword_text import PIECES, TEXTS

ODD = "aAbz <\n\r\t\v\f\x00\x1c\x85\xa0\u2028\u3000-'’._é\u0301ÀßİΣσςſK\u0345\u00ad:·9²Ⅷ中𝔘😀\ufeff"
"""Spaces of all kinds, joiners, letters of one to four bytes, and letters with irregular lower case."""
WORDS = ["</s>", "<unk>", "well-known", "isn’t", "ΟΔΟΣ", "İstanbul", "x" * 40, "\n", " \n", "<P>\n", "\r\n"]
ODD_TEXTS = st.lists(st.one_of(st.text(ODD), st.text(), st.sampled_from(WORDS)), max_size=12).map("".join)
ODD_BYTES = st.lists(st.one_of(ODD_TEXTS.map(str.encode), st.binary(max_size=6)), max_size=3).map(b"".join)
CUSTOM = r"[a-z]+ [a-z]+|\S"
"""A pattern that only Python implements; its words may contain spaces."""
RULES = st.builds(
    TokenRule,
    st.sampled_from([WHITESPACE, SPACES, WORD_PATTERN, CUSTOM]),
    lowercase=st.booleans(),
    skip_markup=st.booleans(),
) | st.builds(TokenRule, st.sampled_from([WHITESPACE, SPACES, CUSTOM]), keep_blank_lines=st.just(True))


def scan(
    files: Sequence[bytes],
    rule: TokenRule,
    scratch: Path,
    *,
    threads: int = 2,
    chunk_size: int = 1 << 20,
    **options: Any,
) -> Scanned:
    texts = [TextFile("x", lambda data=data: io.BytesIO(data)) for data in files]  # type: ignore[misc]
    with mock.patch.multiple(encode, CHUNK_SIZE=chunk_size, num_cores=lambda: threads):
        return scan_split("train", texts, rule=rule, scratch=scratch, **options)


def tokens_of(scanned: Scanned, vocabulary: Vocabulary) -> tuple[list[str], int, int, int, list[int]]:
    """Everything that preparation writes: tokens, words, characters, bytes and marks."""
    blocks = list(scanned.blocks(vocabulary))
    tokens = [token for block in blocks for token in vocabulary.decode(block.ids)]
    marks = [mark for block in blocks if block.marks is not None for mark in block.marks.tolist()]
    words, characters, size = (sum(b.amounts[name] for b in blocks) for name in ("words", "characters", "bytes"))
    return tokens, words, characters, size, marks


def check(files: Sequence[bytes], rule: TokenRule, *, min_count: int = 1, **options: Any) -> None:
    """Compare with the plain definition; both may fail."""
    plain_options = {key: options[key] for key in ("sentence_words", "errors") if key in options}
    with TemporaryDirectory() as scratch:
        try:
            expected = plain_text(files, rule, **plain_options)
            vocabulary = Vocabulary.from_counts(Counter(expected.tokens).items(), VocabularyRule(min_count))
            is_valid = expected.words > 0 and set(vocabulary.words) != {UNK, EOS}
        except ValueError:  # invalid UTF-8 or zero bytes
            is_valid = False
        if not is_valid:
            with pytest.raises(UserError):
                scan(files, rule, Path(scratch), **options).vocabulary(VocabularyRule(min_count))
            return
        scanned = scan(files, rule, Path(scratch), **options)
        actual = scanned.vocabulary(VocabularyRule(min_count))
        assert (actual.words, actual.counts.tolist()) == (vocabulary.words, vocabulary.counts.tolist())
        tokens, words, characters, size, _ = tokens_of(scanned, actual)
        assert tokens == [token if token in vocabulary.ids else UNK for token in expected.tokens]
        assert (words, characters, size) == expected[1:4]
        assert list(Path(scratch).iterdir()) == []


@settings(deadline=None, max_examples=300)
@given(
    st.lists(ODD_BYTES, min_size=1, max_size=4),
    RULES,
    st.sampled_from([None, None, 0, 1, 3, 1000]),
    st.sampled_from(["strict", "replace"]),
    st.integers(1, 3),
    st.sampled_from([3, 5, 8, 64, 1 << 20]),
    st.sampled_from([1, 2]),
)
@example([b"a b", b"c\n"], TokenRule(WHITESPACE), None, "strict", 1, 3, 1)
@example([b"a b c d\t\n\nb e f \n"], TokenRule(WHITESPACE), None, "strict", 1, 3, 1)
@example(["Σ ΑΣ ΑΣ".encode()], TokenRule(WORD_PATTERN, lowercase=True), None, "strict", 1, 4, 1)
@example([b"\xef\xbb\xbf<P>\n\xef\xbb\xbfa"], TokenRule(SPACES, skip_markup=True), None, "strict", 1, 3, 2)
@example([b"<a b c\nd <e f\n<g"], TokenRule(WHITESPACE, skip_markup=True), None, "strict", 1, 3, 1)
@example([b"\n \na\n\n ", b"", b"\t"], TokenRule(WHITESPACE, keep_blank_lines=True), None, "strict", 1, 3, 1)
@example([b"<\xff\n a\xff"], TokenRule(WHITESPACE, skip_markup=True), None, "strict", 1, 3, 1)
def test_scanner_equals_the_plain_definition(
    files: list[bytes],
    rule: TokenRule,
    sentence_words: int | None,
    errors: str,
    min_count: int,
    chunk_size: int,
    threads: int,
) -> None:
    options: dict[str, Any] = {"sentence_words": sentence_words, "errors": errors, "chunk_size": chunk_size}
    check(files, rule, min_count=min_count, threads=threads, **options)


@pytest.mark.parametrize("threads", [1, 3])
def test_many_words_long_words_and_long_lines(threads: int) -> None:
    """More words than a new table has room for, and a word and a line of many chunks."""
    words = [f"{number:x}é{'y' * (number % 7)}" for number in range(120_000)]
    data = " ".join(words + words[:50_000]) + "\n" + "z" * 300_000 + " " + "w " * 200_000 + "\n\nend"
    check([data.encode(), b"end"], TokenRule(WHITESPACE), min_count=2, threads=threads, chunk_size=1 << 14)


def test_scanned_split_keeps_no_ids_in_memory(tmp_path: Path) -> None:
    scanned = scan([b"a b\n" * 1000], TokenRule(WHITESPACE), tmp_path, chunk_size=64)
    assert len(scanned.segments) > 50
    assert all(block.ids.base is None and not len(block.ids) for _, _, block in scanned.segments)


def test_overridden_rule_is_applied_to_each_line(tmp_path: Path) -> None:
    class Letters(TokenRule):
        def words(self, line: str) -> list[str]:
            return list(line.strip())

    scanned = scan([b"a b\nc"], Letters(WHITESPACE), tmp_path)
    vocabulary = scanned.vocabulary(ALL_WORDS)
    assert tokens_of(scanned, vocabulary)[0] == ["a", " ", "b", EOS, "c", EOS]


@settings(deadline=None)
@given(st.sampled_from([WHITESPACE, SPACES, WORD_PATTERN]), st.characters())
def test_kinds_are_those_of_the_pattern(pattern: str, character: str) -> None:
    kind = kinds_of(pattern, line_end=LINE_END)[ord(character)]
    alone, joined = re.findall(pattern, character), re.findall(pattern, f"a{character}a")
    if character == "\n":
        assert kind == LINE_END
    elif not alone:
        assert kind == SPACE and joined == ["a", "a"]
    elif len(joined) == 1:
        assert kind == (WORD if len(re.findall(pattern, f"{character}a")) == 1 else JOINER)
    else:
        assert kind == SINGLE and joined == ["a", character, "a"]


def test_given_vocabulary_is_used(tmp_path: Path) -> None:
    vocabulary = Vocabulary.from_counts([("b", 3), ("a", 2)])
    scanned = scan([b"a c a\nb"], TokenRule(WHITESPACE), tmp_path)
    assert tokens_of(scanned, vocabulary)[0] == ["a", UNK, "a", EOS, "b", EOS]


def test_results_are_in_order_and_not_far_ahead() -> None:
    begun: list[int] = []

    def slow_first(number: int) -> int:
        begun.append(number)
        time.sleep(0.02 * (number % 3 == 0))
        return number

    results = in_order(slow_first, iter(range(40)), threads=3)
    assert next(results) == 0
    assert len(begun) <= 8
    assert [0, *results] == list(range(40))


def test_exception_in_a_thread_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        list(in_order(lambda number: 1 // (number - 5), iter(range(100)), threads=2))


# ---- subwords ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def subwords() -> SubwordVocabulary:
    counts = Counter(plain_text([TEXTS["train"].encode()], TokenRule(WHITESPACE)).tokens)
    return learn_pieces(Vocabulary.from_counts(counts.items(), VocabularyRule(3)), PIECES, counts)


@settings(deadline=None, max_examples=100)
@given(
    files=st.lists(ODD_TEXTS.filter(lambda t: t.strip("\ufeff").split() and "\0" not in t), min_size=1, max_size=3),
    pattern=st.sampled_from([WHITESPACE, SPACES, WORD_PATTERN]),
    sentence_words=st.sampled_from([None, 1, 3]),
    chunk_size=st.sampled_from([3, 5, 64]),
)
def test_any_text_is_spelled_completely(
    subwords: SubwordVocabulary, files: list[str], pattern: str, sentence_words: int | None, chunk_size: int
) -> None:
    rule, data = TokenRule(pattern), [file.encode() for file in files]
    plain = plain_text(data, rule, sentence_words=sentence_words)
    spelling = [subwords.encode([token]).tolist() for token in plain.tokens]
    with TemporaryDirectory() as scratch:
        scanned = scan(data, rule, Path(scratch), sentence_words=sentence_words, chunk_size=chunk_size)
        pieces, words, characters, size, marks = tokens_of(scanned, subwords)
    assert pieces == subwords.decode([piece for word in spelling for piece in word])
    assert (words, characters, size) == plain[1:4]
    lengths = [0, *accumulate(map(len, spelling))]
    assert [index + 1 for index, mark in enumerate(marks) if mark & WORD_END] == lengths[1:]
    if UNK not in plain.tokens and not any("▁" in file or EOS in file for file in files):
        joiner = PieceJoiner(TokenRule(SPACES))
        assert "".join(joiner.add(piece) for piece in pieces if piece != EOS) == " ".join(
            token for token in plain.tokens if token != EOS
        )
        assert UNK not in pieces
