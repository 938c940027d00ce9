"""Processes that are the ranks of a group, as under torchrun, and do a named piece of work each time they are asked.

While nobody asks they wait for a pipe, without a turn of the processor. So two groups can stand ready side by side and
be measured in turns.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from types import TracebackType

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lm.benchmark.measure import Step, environment
from lm.system.ranks import Ranks

MakeWork = Callable[[Ranks], Mapping[str, Step]]


class Workers:
    """A group of ranks, each a process with so many threads; `make_work` must be importable."""

    def __init__(self, make_work: MakeWork, *, size: int, threads: int) -> None:
        # As with torchrun, the store at which the ranks meet is the launcher's; it takes any port that is free.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        spawning = multiprocessing.get_context("spawn")
        for rank in range(size):
            ours, theirs = spawning.Pipe()
            self._pipes.append(ours)
            with environment(**self._variables(rank, size)):
                spawning.Process(target=_serve, args=(make_work, threads, theirs), daemon=True).start()
            theirs.close()
        for pipe in self._pipes:
            pipe.recv()

    def _variables(self, rank: int, size: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_WAIT_POLICY": "PASSIVE",  # as lm/config/command_line.py has it
        }

    def seconds(self, name: str) -> float:
        """By the clock on the wall: how long a piece of work takes, from when all ranks begin until all are done."""
        for pipe in self._pipes:
            pipe.send(name)
        return max(float(pipe.recv()) for pipe in self._pipes)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for pipe in self._pipes:
            pipe.close()  # which ends them


def _serve(make_work: MakeWork, threads: int, pipe: Connection) -> None:
    torch.set_num_threads(threads)
    ranks = Ranks.from_environment()
    with ranks.joined(torch.device("cpu")):
        work = make_work(ranks)
        pipe.send(os.getpid())
        while True:
            try:
                name = pipe.recv()
            except EOFError:
                return
            ranks.all_max(0)
            start = time.monotonic()
            work[name]()
            ranks.all_max(0)
            pipe.send(time.monotonic() - start)
