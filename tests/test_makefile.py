"""The Makefile's commands in a fresh clone."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT


def planned(folder: Path, target: str) -> str:
    """Return a target's commands without running them."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    done = subprocess.run(["make", "-n", target], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_training_installs_only_what_it_needs(tmp_path: Path) -> None:
    commands = planned(tmp_path, "train")
    assert "-e '.[plots]'" in commands and "dev" not in commands.replace("/dev/", "")
    assert commands.index("-e '.[plots]'") < commands.index("train.py")


@pytest.mark.parametrize("target", ["test", "lint", "setup"])
def test_make_installs_dev_tools(tmp_path: Path, target: str) -> None:
    assert "-e '.[plots,dev]'" in planned(tmp_path, target)


def test_full_environment_suffices_for_training(tmp_path: Path) -> None:
    planned(tmp_path, "train")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/.installed").touch()
    assert "pip install" not in planned(tmp_path, "help") + planned_again(tmp_path, "train")


def planned_again(folder: Path, target: str) -> str:
    """Plan again without copying the files, which would be newer than the environment."""
    (folder / ".venv/.installed").touch()
    return subprocess.run(["make", "-n", target], cwd=folder, capture_output=True, text=True, check=True).stdout
