"""Lines become words by the rule of their corpus."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.config.data import TextConfig
from lm.data.text.tokenize import SPACES, WHITESPACE, WORD_PATTERN, TokenRule, rule_of
from lm.system.errors import UserError

SPACED = st.text(st.one_of(st.sampled_from("ab \t\r\v\f\x1c\x85\xa0\u2028\u3000é"), st.characters(codec="utf-8")))


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
def test_europarl_examples(line: str, words: list[str]) -> None:
    assert rule_of({"name": "europarl"}).words(line) == words


def test_the_rule_is_the_same_from_a_config_and_from_plain_values() -> None:
    config = TextConfig("text", "data", "x", True, 2)
    assert rule_of(config) == rule_of(vars(config)) == TokenRule(WHITESPACE, lowercase=True)
    assert rule_of(vars(config) | {"lowercase": False}) == TokenRule(WHITESPACE)
    for name in ("text8", "zipf"):
        assert rule_of({"name": name}) == TokenRule(WHITESPACE)
    assert rule_of({"name": "one_billion_word"}) == TokenRule(SPACES)
    assert rule_of({"name": "pydoc"}) == TokenRule(WORD_PATTERN, lowercase=True)


def test_a_rule_of_no_known_corpus_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.name must be pydoc.*got 'nonsense\\x1b'"):
        rule_of({"name": "nonsense\x1b"})
