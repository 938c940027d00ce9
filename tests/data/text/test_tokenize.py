"""Lines become words by the rule of their corpus."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.config.registry import find_plugin
from lm.data.corpora.europarl import EuroparlConfig, EuroparlRelease
from lm.data.corpora.one_billion_word import ShardOrder
from lm.data.settings import rule_of
from lm.data.text.tokenize import SPACES, WHITESPACE, WORD_PATTERN, TokenRule

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
    config = EuroparlConfig("europarl", "data", 3, language="bg", release=EuroparlRelease.source)
    assert config.token_rule.words(line) == words


def test_each_corpus_has_its_rule() -> None:
    def rule(name: str, **settings: Any) -> TokenRule:
        return rule_of(find_plugin("data", name).settings(name, "data", **settings))

    assert rule("text", min_count=2, dir="x", lowercase=True) == TokenRule(WHITESPACE, lowercase=True)
    assert rule("text", min_count=2, dir="x", lowercase=False) == TokenRule(WHITESPACE)
    assert rule("text8", min_count=11) == rule("zipf", vocab_size=16, tokens=1000, seed=1) == TokenRule(WHITESPACE)
    assert rule("one_billion_word", min_count=3, shard_order=ShardOrder.fixed) == TokenRule(SPACES)
    assert rule("pydoc", min_count=2) == TokenRule(WORD_PATTERN, lowercase=True)
    assert rule("europarl", min_count=3, language="bg", release=EuroparlRelease.source) == TokenRule(
        WORD_PATTERN, lowercase=True, skip_markup=True
    )
