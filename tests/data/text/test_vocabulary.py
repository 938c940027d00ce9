"""A vocabulary has the true counts, in decreasing order, and decodes every word."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.data.text.vocabulary import EOS, UNK, Vocabulary
from lm.system.errors import UserError

WORDS = st.one_of(
    st.sampled_from(["a", "b", "c", "d", UNK, EOS, "é", "tab\there", " "]),
    st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), min_size=1, max_size=4),
)
SENTENCES = st.lists(st.lists(WORDS, min_size=1, max_size=8), min_size=1, max_size=20)
MIN_COUNTS = st.integers(1, 4)


def vocabulary_of(sentences: list[list[str]], min_count: int) -> Vocabulary:
    counts = Counter(word for sentence in sentences for word in [*sentence, EOS])
    return Vocabulary.from_counts(counts.items(), min_count=min_count)


@given(SENTENCES, MIN_COUNTS)
def test_counts_are_those_of_the_encoded_training_text(sentences: list[list[str]], min_count: int) -> None:
    vocabulary = vocabulary_of(sentences, min_count)
    text = [word for sentence in sentences for word in [*sentence, EOS]]
    times_seen = Counter(text)
    seen = Counter(word if word == EOS or times_seen[word] >= min_count else UNK for word in text)
    assert dict(zip(vocabulary.words, vocabulary.counts.tolist(), strict=True)) == {UNK: 0, EOS: 0} | seen
    encoded = vocabulary.encode(text)
    assert np.array_equal(np.bincount(encoded, minlength=len(vocabulary)), vocabulary.counts)


@given(SENTENCES, MIN_COUNTS)
def test_ids_are_sorted_by_count_then_word(sentences: list[list[str]], min_count: int) -> None:
    vocabulary = vocabulary_of(sentences, min_count)
    pairs = list(zip((-vocabulary.counts).tolist(), vocabulary.words, strict=True))
    assert pairs == sorted(pairs)


@given(SENTENCES, MIN_COUNTS)
def test_order_of_the_text_does_not_matter(sentences: list[list[str]], min_count: int) -> None:
    assert vocabulary_of(sentences, min_count).hash == vocabulary_of(sentences[::-1], min_count).hash


@given(SENTENCES, MIN_COUNTS)
def test_decode_inverts_encode_except_for_unknown_words(sentences: list[list[str]], min_count: int) -> None:
    vocabulary = vocabulary_of(sentences, min_count)
    for sentence in [*sentences, ["never seen before"]]:
        expected = [word if word in vocabulary.words else UNK for word in sentence]
        assert vocabulary.decode(vocabulary.encode(sentence)) == expected


@given(SENTENCES, MIN_COUNTS)
def test_bytes_round_trip(sentences: list[list[str]], min_count: int) -> None:
    vocabulary = vocabulary_of(sentences, min_count)
    again = Vocabulary.from_bytes(vocabulary.to_bytes())
    assert again.words == vocabulary.words
    assert np.array_equal(again.counts, vocabulary.counts)
    assert again.hash == vocabulary.hash


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"a\t1\n",
        b"</s>\t2\n<unk>\t1",
        b"</s>\t2\n<unk>\tx\n",
        b"</s>\n<unk>\t1\n",
        b"</s>\t1\n<unk>\t2\n",
        b"</s>\t2\n<unk>\t1\n<unk>\t1\n",
        b"\xff\t3\n</s>\t2\n<unk>\t1\n",
        b"</s>\t99999999999999999999\n<unk>\t1\n",
    ],
)
def test_invalid_bytes_raise(data: bytes) -> None:
    with pytest.raises(UserError, match="The vocabulary must"):
        Vocabulary.from_bytes(data)


def test_ids_fit_the_dtype() -> None:
    for size, dtype in [(1 << 16, "<u2"), ((1 << 16) + 1, "<u4")]:
        words = ((f"w{number}", 1) for number in range(size - 2))
        vocabulary = Vocabulary.from_counts(words, min_count=1)
        assert len(vocabulary) == size
        assert vocabulary.dtype == np.dtype(dtype)
        assert np.iinfo(vocabulary.dtype).max >= size - 1


def test_unigram_perplexity_by_hand() -> None:
    vocabulary = Vocabulary.from_counts([("a", 5), ("b", 2), (EOS, 2)], min_count=1)
    assert vocabulary.words == ("a", EOS, "b", UNK)
    # <unk> does not occur and is counted once: 5, 2, 2 and 1 of 10.
    expected = math.exp(-(math.log(0.5) + 2 * math.log(0.2) + math.log(0.1)) / 4)
    assert vocabulary.unigram_perplexity(np.array([1, 1, 1, 1])) == pytest.approx(expected)
