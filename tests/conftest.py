"""What many tests share: the command line as a child process, and small settings composed from the shipped files."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
import pytest
import torch

from lm.config import Config
from lm.validation import make_config

ROOT = Path(__file__).resolve().parent.parent
TINY = """
    data=zipf data.vocab_size=30 data.tokens=2000 model=small model.embedding_size=8 model.hidden_size=12
    trainer.batch_size=4 trainer.bptt=5 trainer.max_epochs=null trainer.max_steps=40 trainer.log_every_steps=7
    trainer.threads=1 evaluate.streams=3
""".split()  # noqa: SIM905
"""A run of a second: every part of the real thing, but small."""

# More threads only wait for each other on tensors this small, all the more where the machine is busy.
torch.set_num_threads(1)

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """An empty folder to run commands in; prepared corpora and runs land there."""
    return tmp_path


@pytest.fixture
def command(workspace: Path) -> Command:
    """Run `train.py` or `evaluate.py` in the workspace as a user would."""

    def run(*arguments: str, check: int | None = 0, **options: object) -> "subprocess.CompletedProcess[str]":
        script, *rest = arguments
        done = subprocess.run(
            [sys.executable, str(ROOT / script), *rest],
            cwd=workspace,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "COLUMNS": "120"},
            **options,  # type: ignore[call-overload]
        )
        assert check is None or done.returncode == check, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def compose() -> Callable[..., Config]:
    """The typed config of a command line, without running it."""

    def make(*overrides: str) -> Config:
        with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            return make_config(hydra.compose("train", list(overrides)), Config)

    return make


@pytest.fixture
def tiny(compose: Callable[..., Config], workspace: Path) -> Callable[..., Config]:
    """TINY settings with more overrides, keeping its files in the workspace."""

    def make(*overrides: str) -> Config:
        return compose(*TINY, f"data.root={workspace}/data", f"run_dir={workspace}/run", *overrides)

    return make
