"""Real ranks in a real process group, started without torchrun."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from tests.helpers.forks import TRAIN, Fork, train

__all__ = ["TRAIN", "TWO_GPUS", "Ended", "Group", "run_ranks", "train"]

TWO_GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
"""For NCCL versions of the Gloo tests."""


@dataclass(frozen=True)
class Ended:
    """Exit codes and output of a group of ranks."""

    codes: list[int | None]
    out: str
    err: str


class Group:
    """Ranks that call a function; only their environments differ."""

    def __init__(self, target: Callable[..., Any], *arguments: Any, ranks: int, folder: Path, **variables: str) -> None:
        # As with torchrun, the launcher hosts the rendezvous store, on any free port.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **variables,
        }
        self._forks = [
            Fork(target, *arguments, folder=folder, name=f"rank-{i}", **common, RANK=str(i), LOCAL_RANK=str(i))
            for i in range(ranks)
        ]
        self.processes = [fork.process for fork in self._forks]

    def ended(self, *, within: float = 120) -> Ended:
        """Wait for all ranks; fail if one does not end."""
        codes = [fork.wait(within) for fork in self._forks]
        out, err = ("".join(getattr(fork, kind) for fork in self._forks) for kind in ("out", "err"))
        late = [rank for rank, code in enumerate(codes) if code is None]
        assert not late, f"ranks {late} do not end:\n{out}\n{err}"
        return Ended(codes, out, err)


def run_ranks(target: Callable[..., Any], *arguments: Any, ranks: int, folder: Path) -> Ended:
    """Call an importable function on several ranks in a folder, and wait."""
    return Group(target, *arguments, ranks=ranks, folder=folder).ended()
