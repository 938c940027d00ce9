"""Every command of README.md is run; those that need a corpus to be fetched are checked without being run."""

import json
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch

from lm.benchmark.__main__ import main as benchmark
from lm.cli import check_overrides
from lm.config import Config
from tests.conftest import ROOT, TINY, run_command

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.M | re.S)
COMMANDS = [
    shlex.split(line, comments=True)
    for kind, block in BLOCKS
    for line in block.splitlines()
    if kind == "sh" and line.strip()
]
SMALL = ["trainer.max_steps=8", "trainer.threads=1", "model.hidden_size=64", "output.cost_model=flops"]
FETCHED = ("experiment=text8", "experiment=europarl", "experiment=one_billion_word")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text in PATH and a run in runs/NAME, as the README supposes."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "PATH").mkdir()
    for split in ("train", "valid", "test"):
        (folder / "PATH" / f"{split}.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    run_command(folder, "train.py", *TINY, "run_dir=runs/NAME")
    return folder


def test_the_first_screen_has_the_two_commands() -> None:
    assert README.index("make train") < README.index("make test") < 600
    assert ["make", "train"] in COMMANDS


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_command(words: list[str], place: Path) -> None:
    program, *rest = words
    if program == "make":
        done = subprocess.run(["make", "-n", *rest], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    elif rest[:2] == ["-m", "tensorboard.main"]:
        _look_at_tensorboard(rest, place)
    elif rest[:2] == ["-m", "lm.benchmark"]:
        small = ["vocab=300", "width=32", "repeats=1", f"out={place}/out.json"]
        if "what=step" in rest:
            small += ["cutoffs=20", "embedding=8", "streams=4", "bptt=5", "memory=false"]
        else:
            small += ["tokens=40", f"cost_models={place}"]
        assert benchmark([*rest[2:], *small]) == 0
    elif any(word.startswith(FETCHED) for word in rest):
        check_overrides(rest[1:], name="train", schema=Config)
    else:
        script, *overrides = rest
        if script == "train.py" and overrides[0].startswith("resume=runs"):
            overrides = [overrides[0], "trainer.max_steps=48"]
        elif script == "train.py" and overrides != ["--help"]:
            overrides = [*overrides, *SMALL, *(["data.tokens=3000"] if "experiment=zipf" in overrides else [])]
            if "output=full" in overrides:
                overrides.remove("output.cost_model=flops")
        run_command(place, script, *overrides)


def _look_at_tensorboard(arguments: list[str], place: Path) -> None:
    """Start it as the README says, on a free port, and ask it for the names of the runs."""
    command = [sys.executable, *arguments, "--port=0", "--load_fast=false"]
    server = subprocess.Popen(command, cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        url = next(found[0] for line in server.stderr if (found := re.search(r"http://\S+:\d+/", line)))
        for _ in range(100):  # it answers before it has read its folder
            with urllib.request.urlopen(f"{url}data/runs") as answer:
                runs = json.load(answer)
            if runs:
                break
            time.sleep(0.2)
        assert "NAME" in runs
    finally:
        server.kill()
        server.wait()


def test_python_examples_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    names: dict[str, object] = {"hidden": torch.randn(3, 2, 512), "targets": torch.randint(0, 50_000, (3, 2))}
    for kind, block in BLOCKS:
        if kind == "python":
            exec(block, names)
    assert names["loss"].item() > 0  # type: ignore[attr-defined]
    assert len(names["vocabulary"]) == 32  # type: ignore[arg-type]


def test_links_lead_somewhere() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!http)([^)]+)\)", (ROOT / page).read_text()):
            assert (ROOT / target).exists(), target
