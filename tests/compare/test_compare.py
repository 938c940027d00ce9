"""The comparison of real, tiny runs: tables, plots, damaged runs, error messages."""

import csv
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm.compare import compare
from lm.compare.rows import sections
from lm.compare.run_records import read_run, read_runs
from lm.compare.table import as_text
from lm.system.files import exclusive
from lm.training.metrics import read_metrics
from tests.conftest import ROOT, TINY, compare_runs, run_command


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of the time and is tested once."""
    monkeypatch.setattr("lm.compare.can_plot", lambda: False)


def compared(runs: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    assert compare_runs([str(runs), *arguments]) == 0, capsys.readouterr().err
    return {row["layer"]: row for row in json.loads((runs / "comparison/comparison.json").read_text())}


@pytest.mark.usefixtures("without_plots")
def test_table_matches_summaries(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = compared(runs, capsys)
    assert set(rows) == {"full, lr 0.1", "hsm_freq, lr 0.1", "hsm_freq, lr 0.05"}
    by_perplexity = [row["valid_perplexity_last"] for row in rows.values()]
    assert by_perplexity == sorted(by_perplexity)
    winner = min((row for row in rows.values() if row["finished"]), key=lambda row: row["valid_perplexity_last"])
    assert f"{winner['layer']} (best)" in capsys.readouterr().out
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


@pytest.mark.usefixtures("without_plots")
def test_copies_of_a_run_are_labeled_by_folder(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("full-2", "hsm", "under-way"):
        shutil.rmtree(runs / name)
    shutil.copytree(runs / "full-1", runs / "copy/full-1")
    assert set(compared(runs, capsys)) == {f"full ({runs / path})" for path in ("full-1", "copy/full-1")}


@pytest.mark.usefixtures("without_plots")
def test_unfinished_runs_are_marked(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = compared(runs, capsys)["hsm_freq, lr 0.05"]
    assert not row["finished"]
    assert row["test_perplexity_last"] is None
    assert row["speed_up_over_full"] is None, "no full softmax was trained with its learning rate"
    (evaluation,) = [r for r in read_metrics(runs / "under-way") if "valid/ppl" in r]
    assert row["valid_perplexity_last"] == evaluation["valid/ppl"]
    assert row["parameters"] == evaluation["parameters"]
    text = capsys.readouterr().out
    assert re.search(r"^hsm_freq, lr 0.05 \*", text, re.M)
    assert "* not finished" in text


def test_all_formats_have_the_same_values(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.usefixtures("without_plots")
def test_comparison_is_written_beside_runs_or_here(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert compare_runs(named) == 0
        assert (folder / "comparison.csv").exists()
        shutil.rmtree(folder)


@pytest.mark.usefixtures("without_plots")
def test_comparisons_in_one_folder_wait_for_each_other(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "comparison").mkdir(exist_ok=True)
    with ThreadPoolExecutor() as pool:
        with exclusive(runs / "comparison/.lock", waiting_for="the test"):
            waiting = pool.submit(compare, [runs], out=None)
            while "waiting for the comparison" not in capsys.readouterr().out:
                assert not (runs / "comparison/comparison.md").exists()
                assert not waiting.done()
        waiting.result()
        assert (runs / "comparison/comparison.md").exists()
    assert not list((runs / "comparison").glob(".*"))


def test_corpora_get_separate_sections(runs: Path) -> None:
    run_command(runs.parent, "train.py", *TINY, "data.vocab_size=40", "output=hsm_freq", "run_dir=runs/deep/other")
    assert compare_runs([str(runs)]) == 0
    rows = json.loads((runs / "comparison/comparison.json").read_text())
    (other,) = [row for row in rows if row["folders"] == [str(runs / "deep/other")]]
    assert other["corpus"] == "zipf-2" or {row["corpus"] for row in rows if row is not other} == {"zipf-2"}
    assert other["layer"] == "hsm_freq"
    assert other["speed_up_over_full"] is None
    assert len(list((runs / "comparison").glob("*.svg"))) == 4


def test_same_settings_with_other_text_is_another_corpus(runs: Path) -> None:
    file = runs / "hsm/summary.json"
    summary = json.loads(file.read_text())
    file.write_text(json.dumps(summary | {"corpus": summary["corpus"] | {"valid": "other"}}))
    first, second = sections(read_runs([runs]))
    names = [{run.path.name for row in section.rows for run in row.runs} for section in (first, second)]
    assert names == [{"full-1", "full-2", "under-way"}, {"hsm"}]
    assert second.name == f"{first.name}-2"


@pytest.mark.usefixtures("without_plots")
def test_only_seeds_are_repetitions(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs with the same seed, or with another world size, are not independent repetitions."""
    shutil.copytree(runs / "full-1", runs / "full-again")
    shutil.copytree(runs / "full-1", runs / "full-on-ranks")
    starts = json.loads((runs / "full-1/run.json").read_text())["starts"]
    assert [start["ranks"] for start in starts] == [1]
    (runs / "full-on-ranks/run.json").write_text(json.dumps({"starts": [starts[0] | {"ranks": 2}]}))
    rows = compared(runs, capsys)
    folders = {label: [Path(folder).name for folder in row["folders"]] for label, row in rows.items()}
    assert ["full-1", "full-2"] in folders.values()
    assert ["full-again"] in folders.values()
    assert folders["full, ranks 2"] == ["full-on-ranks"]


@pytest.mark.usefixtures("without_plots")
def test_table_fits_terminal(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With long names, columns and parts of names are left out on the terminal but not in files."""
    for name in ("full-1", "full-2", "hsm"):
        settings = yaml.safe_load((runs / name / "config.yaml").read_text())
        settings["optim"]["lr"] = 0.123456789 if name == "hsm" else 0.987654321
        settings["model"]["dropout"] = 0.123456789 if name == "hsm" else 0.25
        (runs / name / "config.yaml").write_text(yaml.safe_dump(settings))
    rows = compared(runs, capsys)
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 120
    assert any(line.startswith("In comparison.md there are also: ") and "peak GiB" in line for line in shown)
    markdown = (runs / "comparison/comparison.md").read_text()
    assert all(label in markdown for label in rows)
    assert "peak GiB" in markdown
    latex = (runs / "comparison/comparison.tex").read_text()
    assert latex.count(" \\\\\n") == 1 + len(rows)
    assert {line.count(" & ") for line in latex.splitlines() if " & " in line} == {
        markdown.splitlines()[4].count("|") - 2
    }


@pytest.mark.parametrize("factor", [1, 1e3, 1e6, 1e12])
def test_table_fits_terminal_with_any_numbers(trained: Path, factor: float) -> None:
    runs = [read_run(trained / f"full-{seed}") for seed in (1, 2)]
    tags = ("tokens", "train_seconds", "speed/tokens_per_s", "valid/ppl")
    for i, run in enumerate(runs):
        for record in run.records:
            record.update((tag, record[tag] * factor * (1 + i)) for tag in tags if tag in record)
    (section,) = sections([*runs, read_run(trained / "hsm")])
    lines = as_text(section).splitlines()
    assert max(map(len, lines)) <= 120
    assert "valid ppl" in lines[1]
    assert "minutes" not in lines[1] or factor < 1e12


def test_cut_names_stay_distinct(runs: Path) -> None:
    (section,) = sections([read_run(runs / "hsm"), read_run(runs / "full-1")])
    for middle in (("gru", "lstm"), ("x" * 40 + "y", "x" * 40 + "z")):
        labels = [f"adaptive, {word}, adagrad, cutoffs [30,100]" for word in middle]
        rows = [replace(row, label=label) for row, label in zip(section.rows, labels, strict=True)]
        lines = as_text(replace(section, rows=rows)).splitlines()
        names = [line.partition("  ")[0] for line in lines if line.startswith("adaptive,")]
        assert len({*names}) == 2 and all("…" in name for name in names)


@pytest.mark.usefixtures("without_plots")
def test_columns_are_chosen_by_name(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_runs([str(runs), "--columns", "test ppl, minutes"]) == 0
    assert re.search(r"^model +test ppl +minutes$", capsys.readouterr().out, re.MULTILINE)
    assert "| model | test ppl | minutes |" in (runs / "comparison/comparison.md").read_text()
    assert compare_runs([str(runs), "--columns", "test"]) == 2
    assert "--columns must be among model, runs, " in capsys.readouterr().err


def test_table_without_matplotlib(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    compared(runs, capsys)
    assert "pip install matplotlib" in capsys.readouterr().out
    assert not list((runs / "comparison").glob("*.png"))


@pytest.mark.parametrize(
    ("spoil", "named", "message"),
    [
        (lambda _: None, [], "RUNS must name at least one"),
        (lambda _: None, ["nowhere"], "nowhere does not exist"),
        (lambda runs: (runs / "file").write_text(""), ["file"], "file is not a folder"),
        (lambda runs: (runs / "empty").mkdir(), ["empty"], "empty holds no run"),
        (lambda runs: (runs / "hsm/metrics.jsonl").write_text('{"st'), ["hsm"], "hsm has no metrics yet"),
        (lambda runs: (runs / "hsm/config.yaml").unlink(), ["hsm"], "hsm has no readable config.yaml"),
        (lambda runs: (runs / "hsm/summary.json").write_text("{}"), ["hsm"], "hsm is damaged"),
        (lambda runs: (runs / "file").write_text(""), ["hsm", "--out", "file/x"], "cannot be written"),
    ],
)
def test_bad_input_exits_with_two(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, spoil, named: list[str], message
) -> None:
    spoil(runs)
    monkeypatch.chdir(runs)
    assert compare_runs(named) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()
    (file / "x").write_text("")


def change(**values: object) -> Any:
    """Change the first line of metrics.jsonl, or the summary."""

    def spoil(file: Path) -> None:
        first, *rest = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
        file.write_text("\n".join([json.dumps(json.loads(first) | values), *rest]) + "\n")

    return spoil


DAMAGES = [
    ("config.yaml", replace_by_folder, "no readable config.yaml"),
    ("config.yaml", lambda file: file.write_bytes(b"\xff\xfe\0"), "no readable config.yaml"),
    ("config.yaml", lambda file: file.write_text("a: ["), "no readable config.yaml"),
    ("config.yaml", lambda file: file.write_text("kind: mixture\ndata: {name: a}\nruns: 3\n"), "is damaged"),
    ("metrics.jsonl", replace_by_folder, "metrics.jsonl cannot be read"),
    ("metrics.jsonl", lambda file: file.write_text('{"step": 1}\n'), "is damaged"),
    ("metrics.jsonl", change(**{"valid/ppl": "low"}), "is damaged"),
    ("summary.json", change(test={"last": "low"}), "is damaged"),
]


@pytest.mark.usefixtures("without_plots")
@pytest.mark.parametrize(("name", "spoil", "reason"), DAMAGES)
def test_damaged_run_is_skipped(runs: Path, capsys: pytest.CaptureFixture[str], name: str, spoil, reason: str) -> None:
    spoil(runs / "hsm" / name)
    assert compare_runs([str(runs)]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Skipped: ") and reason in line
    rows = json.loads((runs / "comparison/comparison.json").read_text())
    assert [row["layer"] for row in rows] == ["full, lr 0.1", "hsm_freq, lr 0.05"]
    assert compare_runs([str(runs / "hsm")]) == 2
    assert reason in capsys.readouterr().err
    shutil.rmtree(runs / "under-way")
    for run in ("full-1", "full-2"):
        spoil(runs / run / name)
    assert compare_runs([str(runs)]) == 2
    assert capsys.readouterr().err.startswith("None of the 3 runs can be read. ")


def test_names_are_escaped(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run, name in {
        "full-1": "=cmd|'/c calc'!A1",
        "full-2": "<img src=x>[a](b)*",
        "hsm": "\x1b[31m\a$\\frac{$\0\n",
        "under-way": "\ud800 $x",
    }.items():
        values = yaml.safe_load((runs / run / "config.yaml").read_text())
        values["output"]["name"] = name
        (runs / run / "config.yaml").write_text(json.dumps(values))
    assert compare_runs([str(runs)]) == 0
    shown = capsys.readouterr()
    assert not {"\x1b", "\a"} & set(shown.out + shown.err), "including matplotlib's warnings"
    folder = runs / "comparison"
    with (folder / "comparison.csv").open(newline="") as file:
        layers = [line["layer"] for line in csv.DictReader(file)]
    assert any(layer.startswith("'=cmd|") for layer in layers)
    markdown = (folder / "comparison.md").read_text()
    assert "&lt;img src=x&gt;\\[a\\](b)\\*" in markdown and "<img" not in markdown
    assert "=cmd\\|" in markdown
    assert len(list(folder.glob("*.png"))) == 2


@pytest.mark.usefixtures("without_plots")
def test_runs_without_metrics_are_skipped_in_folder(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "hsm/metrics.jsonl").write_text("")
    assert list(compared(runs, capsys)) == ["full, lr 0.1", "hsm_freq, lr 0.05"]


def test_command_without_torch(runs: Path, tmp_path: Path) -> None:
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
