"""Real processes for tests, forked from a server that has already imported torch, which saves seconds.

Starting real commands is tested elsewhere: by sweeps, by the command-line tests and, under
torchrun, by slow tests.
"""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lm.training.sweep
from tests.conftest import ROOT, run_script

TRAIN = str(ROOT / "train.py")
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.helpers.preloaded"])


class Fork:
    """A process that calls an importable function in a folder and writes its output to files there."""

    def __init__(
        self, target: Callable[..., Any], *arguments: Any, folder: Path, name: str = "fork", **variables: str
    ) -> None:
        self._files = {kind: folder / f"{name}.{kind}" for kind in ("out", "err")}
        self.process = CONTEXT.Process(
            target=_become, args=(self._files, folder, variables, target, arguments), daemon=True
        )
        with chdir(ROOT):  # the fork server, if started here, must find the modules to preload
            self.process.start()

    def poll(self) -> int | None:
        """Return the exit code (negative for a signal), or None while running."""
        return self.process.exitcode

    def wait(self, timeout: float = 120) -> int | None:
        """Wait for the exit code; kill the process and return None on timeout."""
        self.process.join(timeout)
        code = self.process.exitcode
        if code is None:
            self.process.kill()
            self.process.join()
        return code

    def send_signal(self, number: int) -> None:
        if self.process.is_alive():
            assert self.process.pid is not None
            os.kill(self.process.pid, number)

    @property
    def out(self) -> str:
        return self._said("out")

    @property
    def err(self) -> str:
        return self._said("err")

    def _said(self, kind: str) -> str:
        return self._files[kind].read_text() if self._files[kind].exists() else ""


def train(*overrides: str) -> None:
    """Run `python train.py ...` inside a process."""
    sys.argv = [TRAIN, *overrides]
    run_script("train.py", list(overrides))


def _become(
    files: dict[str, Path], folder: Path, variables: dict[str, str], target: Callable[..., Any], arguments: Any
) -> None:
    assert "tests.helpers.preloaded" in sys.modules, "forked from a process that has not imported what it should have"
    os.environ.update(variables)
    os.chdir(folder)
    for number, path in enumerate(files.values(), 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    target(*arguments)


def launch(*arguments: str, folder: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run train.py in a process and wait for it."""
    command = [sys.executable, TRAIN, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, **environment})


def fork_runs(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> list[Fork]:
    """Fork the runs of sweeps in this process instead of starting Python; the list grows with each run."""
    started: list[Fork] = []

    def start(command: list[str], *, env: dict[str, str], **_: object) -> Fork:
        assert command[:2] == [sys.executable, TRAIN]
        variables = {key: value for key, value in env.items() if os.environ.get(key) != value}
        started.append(Fork(train, *command[2:], folder=workspace, name=f"run-{len(started)}", **variables))
        return started[-1]

    # Only the name in that module: other code of this process, such as matplotlib, starts programs too.
    monkeypatch.setattr(lm.training.sweep, "subprocess", SimpleNamespace(Popen=start))
    return started
