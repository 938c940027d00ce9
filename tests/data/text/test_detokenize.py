"""Words back to text: readable, and read again as the same words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.data.text.tokenize import SPACES, WHITESPACE, WORD_PATTERN, Joiner, TokenRule

PUNCTUATED = TokenRule(WORD_PATTERN, lowercase=True)


def join(words: list[str], rule: TokenRule) -> str:
    joiner = Joiner(rule)
    return "".join(joiner.add(word) for word in words)


@pytest.mark.parametrize(
    "text",
    [
        'see section "a method" (or two) for it, please.',
        "what? yes: 'this', and \"that\"; 20% of [x].",
        "the members’ votes «so to speak» cost $ 5... no!",
        "f (x) = {y}",
    ],
)
def test_punctuation_stands_where_writing_puts_it(text: str) -> None:
    assert join(PUNCTUATED.words(text), PUNCTUATED) == text.replace("$ 5", "$5")


@given(st.text(alphabet="ab1_-'’\"`()[].,;:!?/%$«»é \t"))
def test_reading_the_text_again_gives_the_same_words(text: str) -> None:
    words = PUNCTUATED.words(text)
    assert PUNCTUATED.words(join(words, PUNCTUATED)) == words


@pytest.mark.parametrize("pattern", [WHITESPACE, SPACES])
def test_words_between_spaces_stay_between_spaces(pattern: str) -> None:
    words = ["It", "'s", "(", "so", ")", '"', "."]
    assert join(words, TokenRule(pattern)) == " ".join(words)


def test_a_sentence_begins_without_space_and_with_every_quote_closed() -> None:
    joiner = Joiner(PUNCTUATED)
    assert [joiner.add(word) for word in ["a", '"', "b"]] == ["a", ' "', "b"]
    joiner.end()
    assert [joiner.add(word) for word in ['"', "c", '"']] == ['"', "c", '"']
