"""The comparison of real, tiny runs: what the table says, what is written, what is refused."""

import csv
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lm.compare.__main__ import main
from lm.compare.rows import sections
from lm.runs.reading import read_run
from lm.training.metrics import read_metrics
from tests.conftest import ROOT, TINY, run_command

EVALUATED = ["trainer.eval_every_steps=20", "trainer.log_every_steps=5"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of two layers, one of them with two seeds, and one that is under way."""
    folder = tmp_path_factory.mktemp("compared")
    for name, settings in {
        "full-1": ["seed=1"],
        "full-2": ["seed=2"],
        "hsm": ["output=hsm_freq"],
        "under-way": ["output=hsm_freq", "optim.lr=0.05"],
    }.items():
        run_command(folder, "train.py", *TINY, *EVALUATED, *settings, f"run_dir=runs/{name}")
    _make_unfinished(folder / "runs/under-way")
    return folder / "runs"


def _make_unfinished(run: Path) -> None:
    """As if the run had been killed after half of its records, in the middle of a line."""
    (run / "summary.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    half = "".join(lines[: len(lines) // 2])
    (run / "metrics.jsonl").write_text(half + lines[-1][:9])


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    """A copy of them that a test may break."""
    shutil.copytree(trained, tmp_path / "runs")
    return tmp_path / "runs"


def compared(runs: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    assert main([str(runs), *arguments]) == 0, capsys.readouterr().err
    return {row["layer"]: row for row in json.loads((runs / "comparison/comparison.json").read_text())}


def test_figures_are_those_of_the_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = compared(runs, capsys)
    assert list(rows) == ["full, lr 0.1", "hsm_freq, lr 0.1", "hsm_freq, lr 0.05"]
    summaries = [json.loads((runs / name / "summary.json").read_text()) for name in ("full-1", "full-2")]
    records = [read_metrics(runs / name) for name in ("full-1", "full-2")]
    full = rows["full, lr 0.1"]
    for split in ("valid", "test"):
        for which in ("last", "best"):
            values = [summary[split][which] for summary in summaries]
            assert full[f"{split}_perplexity_{which}"] == pytest.approx(statistics.mean(values))
            assert full[f"{split}_perplexity_{which}_spread"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    assert full["runs"] == 2
    assert full["parameters"] == summaries[0]["parameters"]
    assert full["training_minutes"] == pytest.approx(statistics.mean(s["train_seconds"] for s in summaries) / 60)
    speeds = [statistics.median(r["speed/tokens_per_s"] for r in run if "speed/tokens_per_s" in r) for run in records]
    assert full["tokens_per_second"] == pytest.approx(statistics.mean(speeds))
    peaks = [max(r["memory/peak_gib"] for r in run if "memory/peak_gib" in r) for run in records]
    assert full["peak_memory_gib"] == pytest.approx(statistics.mean(peaks))
    assert full["speed_up_over_full"] == pytest.approx(1)
    hsm = rows["hsm_freq, lr 0.1"]
    assert hsm["speed_up_over_full"] == pytest.approx(hsm["tokens_per_second"] / full["tokens_per_second"])


def test_unfinished_runs_are_shown_and_marked(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = compared(runs, capsys)["hsm_freq, lr 0.05"]
    assert not row["finished"]
    assert row["test_perplexity_last"] is None
    assert row["speed_up_over_full"] is None, "no full softmax was trained with its learning rate"
    (evaluation,) = [r for r in read_metrics(runs / "under-way") if "valid/ppl" in r]
    assert row["valid_perplexity_last"] == evaluation["valid/ppl"]
    assert row["parameters"] == evaluation["parameters"]
    text = capsys.readouterr().out
    assert re.search(r"^hsm_freq, lr 0.05 \*", text, re.M)
    assert "* has not reached its limits" in text


def test_every_form_says_the_same(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = compared(runs, capsys, "--out", str(runs / "comparison"))
    text = capsys.readouterr().out
    folder = runs / "comparison"
    markdown = (folder / "comparison.md").read_text()
    with (folder / "comparison.csv").open(newline="") as file:
        lines = {line["layer"]: line for line in csv.DictReader(file)}
    assert lines.keys() == rows.keys()
    for label, row in rows.items():
        shown = f"{row['valid_perplexity_last']:.2f}"
        assert any(label in line and shown in line for line in text.splitlines())
        assert any(label in line and shown in line for line in markdown.splitlines() if line.startswith("|"))
        assert float(lines[label]["valid_perplexity_last"]) == row["valid_perplexity_last"]
    images = re.findall(r"!\[.*\]\((.*)\)", markdown)
    assert len(images) == 2
    for image in images:
        assert (folder / image).read_bytes().startswith(b"\x89PNG")
        svg = (folder / image).with_suffix(".svg").read_text()
        assert "<svg" in svg


def test_it_is_written_beside_the_runs_or_where_one_stands(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.compare.can_plot", lambda: False)  # drawing takes most of the time, and is tested above
    monkeypatch.chdir(runs / "hsm")
    (runs / "deep").mkdir()
    (runs / "full-2").rename(runs / "deep/full-2")
    for named, folder in [
        (["."], runs / "comparison"),
        (["../hsm", str(runs / "full-1")], runs / "comparison"),
        (["../hsm", "../deep/full-2"], runs / "hsm/comparison"),
        ([".", "--out", "../here"], runs / "here"),
        ([".."], runs / "comparison"),
    ]:
        assert main(named) == 0
        assert (folder / "comparison.csv").exists()
        shutil.rmtree(folder)


def test_one_corpus_is_never_measured_against_another(runs: Path) -> None:
    run_command(runs.parent, "train.py", *TINY, "data.vocab_size=40", "output=hsm_freq", "run_dir=runs/deep/other")
    assert main([str(runs)]) == 0
    rows = json.loads((runs / "comparison/comparison.json").read_text())
    (other,) = [row for row in rows if row["folders"] == [str(runs / "deep/other")]]
    assert other["corpus"] == "zipf-2" or {row["corpus"] for row in rows if row is not other} == {"zipf-2"}
    assert other["layer"] == "hsm_freq"
    assert other["speed_up_over_full"] is None
    assert len(list((runs / "comparison").glob("*.svg"))) == 4


def test_points_stand_at_the_ends_of_epochs(workspace: Path) -> None:
    settings = ["data.tokens=1000", "trainer.max_steps=120", "trainer.eval_every_steps=40"]
    run_command(workspace, "train.py", *TINY, *settings, "run_dir=run")
    evaluations = read_run(workspace / "run").evaluations
    per_epoch = 1000 // (4 * 5)  # tokens over streams times steps
    assert [e.step for e in evaluations] == [40, 50, 80, 100, 120]
    assert [e.step for e in evaluations if e.ends_epoch] == [per_epoch, 2 * per_epoch]


def test_curves_of_seeds_are_averaged(trained: Path) -> None:
    one, two = (read_run(trained / name) for name in ("full-1", "full-2"))
    (section,) = sections([one, two])
    (row,) = section.rows
    for (mean, low, high), a, b in zip(row.curve, one.evaluations, two.evaluations, strict=True):
        assert (low, high) == (min(a.perplexity, b.perplexity), max(a.perplexity, b.perplexity))
        assert mean.perplexity == pytest.approx((a.perplexity + b.perplexity) / 2)
        assert mean.seconds == pytest.approx((a.seconds + b.seconds) / 2)


def test_without_matplotlib_there_is_a_table_and_a_word(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    compared(runs, capsys)
    assert "pip install 'adaptive-lm[plots]'" in capsys.readouterr().out
    assert not list((runs / "comparison").glob("*.png"))


@pytest.mark.parametrize(
    ("spoil", "named", "message"),
    [
        (lambda _: None, [], "RUNS must name at least one"),
        (lambda _: None, ["nowhere"], "nowhere does not exist"),
        (lambda runs: (runs / "file").write_text(""), ["file"], "file is not a folder"),
        (lambda runs: (runs / "empty").mkdir(), ["empty"], "empty holds no run with figures"),
        (lambda runs: (runs / "hsm/metrics.jsonl").unlink(), ["hsm"], "hsm has no figures yet"),
        (lambda runs: (runs / "hsm/metrics.jsonl").write_text(""), ["hsm"], "hsm has no figures yet"),
        (lambda runs: (runs / "hsm/metrics.jsonl").write_text('{"st'), ["hsm"], "hsm has no figures yet"),
        (lambda runs: (runs / "hsm/config.yaml").unlink(), ["hsm"], "has no config.yaml"),
        (lambda runs: (runs / "hsm/config.yaml").write_text("a: ["), ["hsm"], "does not hold the settings of a run"),
        (lambda runs: (runs / "hsm/config.yaml").write_text("data: 1"), ["hsm"], "does not hold the settings"),
        (lambda runs: (runs / "hsm/summary.json").write_text("{}"), ["hsm"], "summary.json is damaged"),
        (
            lambda runs: (runs / "hsm/metrics.jsonl").write_bytes(b"\xff\xfe\n"),
            ["."],
            "damaged: line 1 is not a record",
        ),
        (lambda runs: (runs / "hsm/metrics.jsonl").write_text('{"step": 1}\n'), ["."], "record 1 does not say its"),
        (lambda runs: (runs / "hsm/metrics.jsonl").write_text("[" * 99999 + "\n"), ["."], "line 1 is not a record"),
        (lambda runs: (runs / "file").write_text(""), ["hsm", "--out", "file/x"], "cannot be written"),
    ],
)
def test_bad_input_is_one_clear_paragraph(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, spoil, named: list[str], message
) -> None:
    spoil(runs)
    monkeypatch.chdir(runs)
    assert main(named) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_of_many_runs_those_that_are_just_beginning_are_passed_over(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "hsm/metrics.jsonl").write_text("")
    assert list(compared(runs, capsys)) == ["full, lr 0.1", "hsm_freq, lr 0.05"]


def test_it_needs_no_torch_and_prints_no_traceback(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = subprocess.run(
        [sys.executable, "-m", "lm.compare", str(runs)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert "speed-up" in done.stdout
