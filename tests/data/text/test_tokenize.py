"""Tokenizers split lines into words, and joiners turn words back into text."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.config.registry import find_plugin
from lm.data.source import rule_of
from lm.data.text.tokenize import SPACES, WHITESPACE, WORD_PATTERN, Joiner, TokenRule

SPACED = st.text(st.one_of(st.sampled_from("ab \t\r\v\f\x1c\x85\xa0\u2028\u3000é"), st.characters(codec="utf-8")))
PUNCTUATED = TokenRule(WORD_PATTERN, lowercase=True)


@given(SPACED, st.sampled_from([WHITESPACE, SPACES, WORD_PATTERN]), st.booleans())
def test_words_are_the_matches_of_the_pattern(line: str, pattern: str, lowercase: bool) -> None:
    line = line.replace("\n", "") + "\n"
    expected = re.findall(pattern, line.lower() if lowercase else line)
    assert TokenRule(pattern, lowercase=lowercase).words(line) == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("Mr President's well-known, isn’t it?", ["mr", "president's", "well-known", ",", "isn’t", "it", "?"]),
        ("'quoted' -dash- 3.5%", ["'", "quoted", "'", "-", "dash", "-", "3", ".", "5", "%"]),
        ("Европейски съюз...", ["европейски", "съюз", ".", ".", "."]),
        (" \n", []),
    ],
)
def test_words_and_punctuation(line: str, words: list[str]) -> None:
    assert PUNCTUATED.words(line) == words


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("text", TokenRule(WHITESPACE)),
        ("text8", TokenRule(WHITESPACE)),
        ("zipf", TokenRule(WHITESPACE)),
        ("one_billion_word", TokenRule(SPACES)),
        ("pydoc", PUNCTUATED),
        ("docstrings", PUNCTUATED),
        ("europarl", TokenRule(WORD_PATTERN, lowercase=True, skip_markup=True)),
    ],
)
def test_rule_of_each_corpus(name: str, rule: TokenRule) -> None:
    assert rule_of(find_plugin("data", name).settings()) == rule


# ---- words to text -----------------------------------------------------------------------------------------------


def join(words: list[str], rule: TokenRule) -> str:
    joiner = Joiner(rule)
    return "".join(joiner.add(word) for word in words)


@pytest.mark.parametrize(
    "text",
    [
        'see section "a method" (or two) for it, please.',
        "what? yes: 'this', and \"that\"; 20% of [x].",
        "the members’ votes «so to speak» cost $5... no!",
        "f (x) = {y}",
    ],
)
def test_punctuation_is_attached(text: str) -> None:
    assert join(PUNCTUATED.words(text), PUNCTUATED) == text


@given(st.text(alphabet="ab1_-'’\"`()[].,;:!?/%$«»é \t"))
def test_tokenizing_joined_text_gives_the_same_words(text: str) -> None:
    words = PUNCTUATED.words(text)
    assert PUNCTUATED.words(join(words, PUNCTUATED)) == words


@pytest.mark.parametrize("pattern", [WHITESPACE, SPACES])
def test_words_separated_by_spaces_are_joined_by_spaces(pattern: str) -> None:
    words = ["It", "'s", "(", "so", ")", '"', "."]
    assert join(words, TokenRule(pattern)) == " ".join(words)


def test_new_sentence_has_no_space_and_no_open_quote() -> None:
    joiner = Joiner(PUNCTUATED)
    assert [joiner.add(word) for word in ["a", '"', "b"]] == ["a", ' "', "b"]
    joiner.end()
    assert [joiner.add(word) for word in ['"', "c", '"']] == ['"', "c", '"']
