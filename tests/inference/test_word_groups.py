"""Word groups: id ranges that cover every word once, with perplexities consistent with the total."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.inference.word_groups import by_cluster, by_frequency, groups_table, score_groups
from lm.model.scoring import Score


@given(st.lists(st.integers(0, 12_345), min_size=2))
def test_frequency_groups_are_powers_of_ten(counts: list[int]) -> None:
    counts_V = np.array(sorted(counts, reverse=True))
    groups = by_frequency(counts_V)
    assert [word for ids in groups.values() for word in ids] == list(range(len(counts)))
    for name, ids in groups.items():
        digits = {len(str(count)) for count in counts_V[ids.start : ids.stop].tolist()}
        assert len(digits) == 1
        expected = f"seen {10 ** (digits.pop() - 1):,} " if counts_V[ids.start] > 9 else "seen fewer than 10 times"
        assert name.startswith(expected)


def test_groups_add_up_to_total() -> None:
    generator = np.random.default_rng(0)
    tokens_V, counts_V = generator.integers(1, 50, 40), np.sort(generator.integers(0, 5000, 40))[::-1]
    score = Score(tokens_V, generator.random(40) * 200, 3, 1, 1.0, [4, 30])
    for groups in (by_frequency(counts_V), by_cluster(score.cutoffs, vocab_size=40)):
        figures = score_groups(score, groups)
        assert sum(f["words"] for f in figures) == 40
        assert sum(f["share"] for f in figures) == pytest.approx(1)
        assert sum(f["share"] * math.log(f["perplexity"]) for f in figures) == pytest.approx(score.loss)
    assert [f["name"] for f in figures] == ["head", "tail 1", "tail 2"]
    assert by_cluster([], vocab_size=40) == {}


def test_table_shows_splits_side_by_side() -> None:
    score = Score(np.array([4, 0]), np.array([4.0, 0.0]), 0, 1, 1.0, [1])
    figures = score_groups(score, by_cluster([1], vocab_size=2))
    lines = groups_table({"valid": figures, "test": figures}).splitlines()
    assert lines[0].split() == ["words", "number", "valid", "tokens", "perplexity", "test", "tokens", "perplexity"]
    assert lines[2].split() == ["head", "1", "100.0%", "2.72", "100.0%", "2.72"]
    assert lines[3].split() == ["tail", "1", "1", "0.0%", "-", "0.0%", "-"]
