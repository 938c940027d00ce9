"""The word table behaves like a Counter that numbers words by first occurrence."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data.text.vocabulary import EOS, UNK
from lm.data.word_table import LINE_END, MAX_LETTERS, SPACE, WORD, WordTable
from lm.system.errors import UserError

KINDS = np.full(0x110000, WORD, np.uint8)
KINDS[ord(" ")], KINDS[ord("\n")] = SPACE, LINE_END
LONG = ["abcdefgh", "abcdefgha", "abcdefghb", "abcdefgh\0", "\0", "\0\0", "éé", "é" * 9, "x" * 999, "x" * 1000]
WORDS = st.lists(st.one_of(st.sampled_from(LONG), st.text("ab\0é😀", min_size=1)), max_size=30)


@settings(deadline=None)
@given(WORDS, WORDS)
def test_words_are_numbered_and_counted_and_tables_added(one: list[str], other: list[str]) -> None:
    tables = []
    for words in (one, other):
        table = WordTable()
        ids, num_words = table.scan(" ".join(words).encode(), kinds=KINDS, ends_line=False)
        distinct = list(dict.fromkeys([UNK, EOS, *words]))
        assert list(table.all_words()) == distinct
        assert [distinct[number] for number in ids] == words
        assert num_words == len(words)
        tables.append(table)
    first, second = tables
    known = list(first.all_words())
    numbers = first.add(second)
    assert [number < len(known) for number in numbers] == [word in known for word in second.all_words()]
    assert list(first.all_words())[: len(known)] == known
    assert list(first.words(numbers.astype(np.int64))) == list(second.all_words())
    counts = dict(zip(first.all_words(), first.counts.tolist(), strict=True))
    assert counts == {UNK: 0, EOS: 0, **Counter(one + other)}


def test_lines_with_words_are_ended() -> None:
    table = WordTable()
    for text, ends_line, expected in [
        (b" \n\na b\n\nc", True, ["a", "b", EOS, "c", EOS]),
        (b"a\n b", False, ["a", EOS, "b"]),
        (b"", True, []),
    ]:
        ids, num_words = table.scan(text, kinds=KINDS, ends_line=ends_line)
        assert list(table.words(ids.astype(np.int64))) == expected
        assert num_words == len(expected) - expected.count(EOS)
    assert table.counts[:2].tolist() == [0, 3]


def test_too_many_letters_raise() -> None:
    with pytest.raises(UserError, match="4 GB"):
        WordTable()._grow(num_letters=MAX_LETTERS)
