"""docs/results.md and ablations.md: every table is what `lm.compare` makes of the runs kept in docs/results."""

import itertools
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from lm.compare import compare
from lm.compare.run_records import find_runs
from lm.config.groups import LIMITS
from lm.config.schema import TrainConfig
from lm.config.validate import changed_keys, flatten, may_change, read_settings
from lm.training.provenance import read_starts
from tests.conftest import ROOT, composed
from tests.helpers.pages import blocks

PAGES = [ROOT / "docs/results.md", ROOT / "docs/ablations.md"]
PAGE = "\n".join(page.read_text() for page in PAGES)
FOLDERS = sorted(path for path in (ROOT / "docs/results").iterdir() if path.is_dir())
RUNS = find_runs(FOLDERS)


def tables(markdown: str) -> list[str]:
    return re.findall(r"(?:^\|.*\|\n)+", markdown, re.M)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_results_table_matches_kept_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lm.compare.can_plot", lambda: False)  # drawing takes most of the time
    compare([folder], out=tmp_path)
    capsys.readouterr()
    assert f"python -m lm.compare docs/results/{folder.name}" in PAGE
    for table in tables((tmp_path / "comparison.md").read_text()):
        assert table in PAGE, f"docs/results.md or ablations.md needs this table:\n{table}"


def test_no_table_without_runs() -> None:
    assert len([table for table in tables(PAGE) if "valid ppl" in table]) == len(FOLDERS)


def test_readme_results_are_kept_runs() -> None:
    """README.md rounds validation and test perplexities of the tables that are tested above."""
    kept = perplexities(PAGE, "valid ppl", "test ppl")
    quoted = perplexities((ROOT / "README.md").read_text(), "valid", "test")
    assert quoted
    for pair in quoted:
        assert any(pair == pytest.approx(row, abs=0.0501) for row in kept), pair


def perplexities(markdown: str, *columns: str) -> list[tuple[float, ...]]:
    """The numbers in these columns, from all rows of all tables that have them."""
    found = []
    for table in tables(markdown):
        header, _, *lines = ([cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines())
        if set(columns) <= set(header):
            cells = [[line[header.index(column)] for column in columns] for line in lines]
            found += [tuple(map(float, row)) for row in cells if all(re.fullmatch(r"[\d.]+", cell) for cell in row)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.parent.name}/{run.name}")
def test_kept_run_can_be_reproduced(run: Path) -> None:
    kept = flatten(read_settings(run))
    if kept.get("kind") == "mixture":
        assert all((run.parent / name / "summary.json").exists() for name in kept["runs"])
    start, *later = read_starts(run)
    assert re.fullmatch(r"[0-9a-f]{40}", start["commit"]), "made from committed code"
    assert start["versions"]["torch"]
    _, script, *overrides = shlex.split(start["command"])
    overrides = [text for text in overrides if not text.startswith(("hydra.", "--"))]  # how a sweep starts its runs
    if script == "train.py":
        today = flatten(asdict(composed(*overrides)))  # refuses settings that have gone or were renamed
        for key in (override.partition("=")[0] for override in overrides):
            key = key if key in today else f"{key}.name"  # an option, as in output=full
            changed_later = later and key in may_change(TrainConfig, values=read_settings(run))
            assert key == "experiment.name" or changed_later or today[key] == kept[key], key


LIMITED = {f"trainer.{key}" for key in LIMITS}
FREE = {"data.archive", "data.dir", "data.root", "trainer.eval_every_steps", "trainer.eval_every_seconds"}
"""Where the text is, and how often a run was evaluated: the page leaves them out."""
TRAINED = [run for run in RUNS if "trainer" in read_settings(run)]


def settings_on_the_page(folder: str) -> list[dict[str, Any]]:
    """What the commands above a table train, a sweep's one by one."""
    found = (block for page in PAGES for block in blocks(page))
    (block,) = (block for block in found if f"lm.compare docs/results/{folder}\n" in block.text)
    lines = [shlex.split(line, comments=True) for line in block.text.splitlines() if "train.py" in line]
    return [asdict(composed(*words)) for line in lines for words in one_by_one(line[2:])]


def one_by_one(overrides: list[str]) -> list[tuple[str, ...]]:
    """The overrides of each run of a sweep, which may be an experiment's own."""
    experiments = [word.partition("=")[2] for word in overrides if word.startswith("experiment=")]
    own = [yaml.safe_load((ROOT / f"conf/experiment/{name}.yaml").read_text()).get("hydra", {}) for name in experiments]
    swept = [f"{key}={v}" for hydra in own for key, v in hydra.get("sweeper", {}).get("params", {}).items()]
    given = [word.partition("=") for word in [*overrides, *swept] if word != "-m"]
    choices = [[f"{key}={one}" for one in re.split(r",(?![^\[]*\])", values)] for key, _, values in given]
    return list(itertools.product(*choices))


@pytest.mark.slow
@pytest.mark.parametrize("run", TRAINED, ids=lambda run: f"{run.parent.name}/{run.name}")
def test_documented_command_matches_kept_settings(run: Path) -> None:
    kept = read_settings(run)
    limits = {key: value for key, value in flatten(kept).items() if key in LIMITED}
    differing = []
    for today in settings_on_the_page(run.parent.name):
        changed = [(key, before, now) for key, before, now in changed_keys(kept, today) if key not in FREE]
        changed += [(key, limit, flatten(today)[key]) for key, limit in limits.items() if flatten(today)[key] != limit]
        differing.append(changed)
    assert [] in differing, min(differing, key=len)
