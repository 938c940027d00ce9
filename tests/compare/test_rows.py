"""Rows and plots of a comparison: repetitions, ratios to the full softmax, names beside curves."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.text import Text

from lm.compare.plots import draw
from lm.compare.rows import Row, sections
from lm.compare.run_records import read_run
from lm.compare.table import as_text
from tests.compare.conftest import make_unfinished


def test_curves_of_seeds_are_averaged(trained: Path) -> None:
    one, two = (read_run(trained / name) for name in ("full-1", "full-2"))
    (section,) = sections([one, two])
    (row,) = section.rows
    for (mean, low, high), a, b in zip(row.curve, one.evaluations, two.evaluations, strict=True):
        assert (low, high) == (min(a.perplexity, b.perplexity), max(a.perplexity, b.perplexity))
        assert mean.perplexity == pytest.approx((a.perplexity + b.perplexity) / 2)
        assert mean.seconds == pytest.approx((a.seconds + b.seconds) / 2)


def test_seeds_evaluated_at_different_steps_have_a_curve(trained: Path) -> None:
    """As in runs evaluated every few seconds."""
    one, two = read_run(trained / "full-1"), read_run(trained / "full-2")
    later = [record | {"step": record["step"] + 1, "tokens": record["tokens"] + 20} for record in two.records]
    (section,) = sections([one, replace(two, records=later)])
    (row,) = section.rows
    assert [mean.tokens for mean, _, _ in row.curve] == [e.tokens + 10 for e in one.evaluations]


def test_perplexity_is_relative_to_finished_full_softmax(trained: Path) -> None:
    full, hsm = read_run(trained / "full-1"), read_run(trained / "hsm")
    (section,) = sections([full, hsm])
    ratios = {row.layer: row.relative_perplexity for row in section.rows}
    expected = hsm.perplexity("valid", "last") / full.perplexity("valid", "last")
    assert ratios == {"full": 1, "hsm_freq": pytest.approx(expected)}
    (section,) = sections([replace(full, summary=None), hsm])
    assert {row.relative_perplexity for row in section.rows} == {None}


def test_every_evaluation_has_a_marker(trained: Path) -> None:
    (section,) = sections([read_run(trained / "full-1")])
    (axes,) = draw(section, "time").axes
    (line,) = axes.lines
    assert len(line.get_xdata()) == len(section.rows[0].curve) == 2
    assert line.get_markevery() is None and line.get_marker() not in ("", "None", None)
    assert axes.get_title() == section.name


def test_rows_of_one_layer_differ_in_plot(runs: Path) -> None:
    make_unfinished(runs / "hsm")
    (section,) = sections([read_run(runs / "hsm"), read_run(runs / "under-way")])
    label = "a model with a name that is too long to stand beside its curve"
    counted = Row([replace(read_run(runs / "hsm"), settings={"kind": "ngram", "order": 5})], label=label)
    figure = draw(replace(section, rows=[*section.rows, counted]), "time")
    (axes,) = figure.axes
    one, other, ngrams = axes.lines
    assert len({line.get_color() for line in (one, other, ngrams)}) == 3 and one.get_marker() != other.get_marker()
    (legend,) = figure.legends
    assert axes.get_legend() is None
    figure.canvas.draw()
    assert legend.get_window_extent().y1 <= axes.get_window_extent().y0, "below the curves"
    assert axes.get_window_extent().width > 0.8 * figure.get_window_extent().width


def test_short_names_stand_beside_their_curves(trained: Path) -> None:
    """Curves that end at the same point too."""
    run = read_run(trained / "full-1")
    (section,) = sections([run])
    names = [f"layer {i}" for i in range(8)]
    figure = draw(replace(section, rows=[Row([run], label=name) for name in names]), "time")
    figure.canvas.draw()
    (axes,) = figure.axes
    assert not figure.legends and sorted(text.get_text() for text in axes.texts) == names
    boxes = sorted((Text.get_window_extent(text) for text in axes.texts), key=lambda box: box.y0)  # without links
    assert all(box.x0 > axes.get_window_extent().x1 for box in boxes), "right of the plot"
    assert all(lower.y1 <= upper.y0 for lower, upper in pairwise(boxes)), "no overlap"
    assert boxes[-1].x1 <= figure.get_window_extent().x1 and boxes[-1].y1 <= figure.get_window_extent().y1


def test_best_columns_shown_if_run_got_worse(trained: Path) -> None:
    run = read_run(trained / "full-1")
    last = next(record for record in reversed(run.records) if "valid/ppl" in record)
    for change, shown in ((-1, True), (1, False)):
        (section,) = sections([replace(run, records=[last | {"valid/ppl": last["valid/ppl"] + change}, last])])
        assert ("best valid" in as_text(section)) is shown


def test_epochs_include_fractions(trained: Path) -> None:
    run = read_run(trained / "full-1")
    assert run.records[-1]["epoch"] == 0
    (section,) = sections([run])
    assert section.rows[0].epochs == pytest.approx(run.records[-1]["tokens"] / 2000)
