"""`python -m lm.benchmark what=clusters` on a toy: the comparison, the figures, error messages."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.benchmark import figures
from lm.benchmark.__main__ import main
from lm.benchmark.candidates import Bench
from lm.benchmark.clusters import fixed_choice, ranks, spearman
from lm.output.clusters.cost_model import flops_model

COUNTS = np.maximum(1, 100_000 // np.arange(1, 301))


def run(folder, *arguments):
    toy = ["what=clusters", "vocab=300", "width=32", "tokens=40", "repeats=1", f"cost_models={folder}"]
    return main([*toy, f"out={folder / 'benchmark.json'}", *arguments])


def bench() -> Bench:
    return Bench(COUNTS, width=32, tokens=40, repeats=1, model=flops_model([32, 8]))


def test_a_toy_run_compares_draws_and_writes_records(tmp_path, capsys):
    assert run(tmp_path, "cutoffs=20,100") == 0
    printed = capsys.readouterr().out
    assert "Spearman" in printed and "x the given cutoffs'" in printed
    records = json.loads((tmp_path / "benchmark.json").read_text())
    assert all(set(record) == {"name", "value", "unit", "ratio"} for record in records)
    times = {r["name"]: r["value"] for r in records if r["name"].endswith("/measured")}
    assert len(times) == 4 * 3 + 2 and min(times.values()) > 0
    drawn = {r["name"].split("/")[2] for r in records} & {"figure_1", "figure_2", "figure_3"}
    for name in drawn:
        assert (tmp_path / f"benchmark.{name}.png").read_bytes().startswith(b"\x89PNG")
    assert len(drawn) == 3


def test_the_set_of_choices_is_geometric_and_covers_what_it_says():
    for coverage in (0.75, 0.9):
        head, middle, last = fixed_choice(bench(), coverage=coverage, num_tails=3)
        assert COUNTS[:head].sum() >= coverage * COUNTS.sum() > COUNTS[: head - 1].sum()
        assert middle / head == pytest.approx(last / middle, rel=0.05)
        assert last / middle == pytest.approx(300 / last, rel=0.05)


def test_figure_3_has_both_objectives_up_to_twenty_tails():
    curves = {curve.label: curve.points for curve in figures.number_of_clusters(bench()).curves}
    for label in ("paper's objective, predicted", "as built, predicted"):
        assert [number for number, _ in curves[label]] == list(range(1, 21))
    assert all(seconds > 0 for points in curves.values() for _, seconds in points)


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=20))
def test_ranks_count_the_smaller_values(values):
    found = ranks(values)
    assert found.tolist() == [
        sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values
    ]


def test_spearman():
    assert spearman([1, 2, 3, 4], [10, 20, 25, 1e9]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert np.isnan(spearman([1, 1], [1, 2]))


def test_mistakes_exit_with_two_and_one_sentence(tmp_path, capsys, monkeypatch):
    assert run(tmp_path, "cutoffs=100,20") == 2
    assert "output.cutoffs must increase" in capsys.readouterr().err
    monkeypatch.setattr(figures, "find_spec", lambda _: None)
    assert run(tmp_path) == 2
    assert "adaptive-lm[plots]" in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "rejected before anything was measured"
