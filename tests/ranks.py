"""Ranks for tests: real processes in a real group, without the launcher.

They are forked from a process that has imported torch once, so that starting them takes a tenth of a second, not five.
What torchrun itself does is tested by the slow tests.
"""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from tests.conftest import ROOT

TWO_GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
"""For tests of NCCL, which mirror those of Gloo."""
TRAIN = str(ROOT / "train.py")
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "torch._dynamo", "torch.nn.parallel", "lm.cli", "lm.run", "tests.training"])


@dataclass(frozen=True)
class Ended:
    """What a group of ranks has left behind."""

    codes: list[int | None]
    out: str
    err: str


class Group:
    """Ranks that call a function, each with its arguments; told apart by their environment alone."""

    def __init__(self, target: Callable[..., Any], *arguments: Any, ranks: int, folder: Path, **variables: str) -> None:
        # As with torchrun, the store at which they meet is the launcher's, on any port that is free.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.folder = folder
        common = {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **variables,
        }
        self.processes = [
            FORKS.Process(
                target=_become,
                args=(common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, folder, target, arguments),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        for process in self.processes:
            process.start()

    def ended(self, *, within: float = 120) -> Ended:
        """Wait for all; those that do not end are a failure."""
        for process in self.processes:
            process.join(within)
        late = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        for rank in late:
            self.processes[rank].kill()
        texts = {
            kind: [(self.folder / f"rank-{i}.{kind}") for i in range(len(self.processes))] for kind in ("out", "err")
        }
        out, err = ("".join(path.read_text() for path in paths if path.exists()) for paths in texts.values())
        assert not late, f"ranks {late} do not end:\n{out}\n{err}"
        return Ended([process.exitcode for process in self.processes], out, err)


def run_ranks(target: Callable[..., Any], *arguments: Any, ranks: int, folder: Path) -> Ended:
    """Call an importable function on so many ranks, in a folder, and wait for them."""
    return Group(target, *arguments, ranks=ranks, folder=folder).ended()


def train(*overrides: str) -> None:
    """`python train.py ...`, inside a rank."""
    sys.argv = [TRAIN, *overrides]
    runpy.run_path(TRAIN, run_name="__main__")


def _become(variables: dict[str, str], folder: Path, target: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(variables)
    os.chdir(folder)
    for number, kind in ((1, "out"), (2, "err")):
        file = os.open(f"rank-{variables['RANK']}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    target(*arguments)
