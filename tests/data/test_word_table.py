"""The table of words is a Counter that numbers its words as they come."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data.text.vocabulary import EOS, UNK
from lm.data.word_table import LINE_END, MOST_LETTERS, SPACE, WORD, WordTable
from lm.system.errors import UserError

KINDS = np.full(0x110000, WORD, np.uint8)
KINDS[ord(" ")], KINDS[ord("\n")] = SPACE, LINE_END
LONG = ["abcdefgh", "abcdefgha", "abcdefghb", "abcdefgh\0", "\0", "\0\0", "éé", "é" * 9, "x" * 999, "x" * 1000]
WORDS = st.lists(st.one_of(st.sampled_from(LONG), st.text("ab\0é😀", min_size=1)), max_size=30)


def words_of(table: WordTable) -> list[str]:
    return list(table.words(np.arange(len(table))))


@settings(deadline=None)
@given(WORDS, WORDS)
def test_words_are_numbered_and_counted_and_tables_added(one: list[str], other: list[str]) -> None:
    tables = []
    for words in (one, other):
        table = WordTable()
        found = table.scan(" ".join(words).encode(), kinds=KINDS, last=False)
        distinct = list(dict.fromkeys([UNK, EOS, *words]))
        assert words_of(table) == distinct
        assert [distinct[number] for number in found.ids] == words
        assert found.words == len(words)
        tables.append(table)
    first, second = tables
    known = words_of(first)
    numbers = first.add(second)
    assert [number < len(known) for number in numbers] == [word in known for word in words_of(second)]
    assert words_of(first)[: len(known)] == known
    assert list(first.words(numbers.astype(np.int64))) == words_of(second)
    assert dict(zip(words_of(first), first.counts.tolist(), strict=True)) == {UNK: 0, EOS: 0, **Counter(one + other)}


def test_lines_that_hold_words_are_ended_and_others_are_told() -> None:
    table = WordTable()
    found = table.scan(b" \n\na b\n\nc", kinds=KINDS, last=True)
    assert list(table.words(found.ids.astype(np.int64))) == ["a", "b", EOS, "c", EOS]
    assert found[1:] == (3, True, True, False)
    assert table.scan(b"a\n b", kinds=KINDS, last=False)[1:] == (2, True, False, True)
    assert table.scan(b"", kinds=KINDS, last=False)[1:] == (0, False, False, False)
    assert table.counts[:2].tolist() == [0, 3]


def test_more_letters_than_it_can_hold_are_refused() -> None:
    with pytest.raises(UserError, match="more than 4 GB of different words"):
        WordTable()._make_room(num_letters=MOST_LETTERS)
