"""Tiny runs of two layers, shared by the comparison tests."""

import shutil
from pathlib import Path

import pytest

from tests.conftest import TINY, run_command

EVALUATED = ["trainer.eval_every_steps=20", "trainer.log_every_steps=5"]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of two layers, one with two seeds, and one unfinished run."""
    folder = tmp_path_factory.mktemp("compared")
    for name, settings in {
        "full-1": ["seed=1"],
        "full-2": ["seed=2"],
        "hsm": ["output=hsm_freq"],
        "under-way": ["output=hsm_freq", "optim.lr=0.05"],
    }.items():
        run_command(folder, "train.py", *TINY, *EVALUATED, *settings, f"run_dir=runs/{name}")
    make_unfinished(folder / "runs/under-way")
    return folder / "runs"


def make_unfinished(run: Path) -> None:
    """Truncate a run as if killed after half of its records, in the middle of a line."""
    (run / "summary.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    half = "".join(lines[: len(lines) // 2])
    (run / "metrics.jsonl").write_text(half + lines[-1][:9])


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    """A copy of the runs that a test may modify."""
    shutil.copytree(trained, tmp_path / "runs")
    return tmp_path / "runs"
