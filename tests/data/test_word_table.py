"""The word table behaves like a Counter that numbers words by first occurrence."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data.text.vocabulary import EOS, UNK
from lm.data.word_table import ANY_LINE_END, LINE_END, MAX_LETTERS, SPACE, WORD, WordTable
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
        ids, num_words, _ = table.scan(" ".join(words).encode(), kinds=KINDS)
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


@pytest.mark.parametrize("kind", [LINE_END, ANY_LINE_END])
def test_lines_are_ended(kind: int) -> None:
    kinds, table = KINDS.copy(), WordTable()
    kinds[ord("\n")] = kind
    blank = [EOS] if kind == ANY_LINE_END else []
    for text, expected, num_blank in [
        (b" \n\na b\n\nc\n", [*blank * 2, "a", "b", EOS, *blank, "c", EOS], 3),
        (b"a\n b", ["a", EOS, "b"], 0),
        (b"", [], 0),
    ]:
        ids, num_words, blank_lines = table.scan(text, kinds=kinds)
        assert list(table.words(ids.astype(np.int64))) == expected
        assert (num_words, blank_lines) == (len(expected) - expected.count(EOS), num_blank)
    assert table.counts[:2].tolist() == [0, 3 + 3 * len(blank)]


def test_too_many_letters_raise() -> None:
    with pytest.raises(UserError, match="4 GB"):
        WordTable()._grow(num_letters=MAX_LETTERS)
