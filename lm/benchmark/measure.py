"""Time and memory measurements that hold on a busy machine.

Candidates take turns, so a slow phase of the machine affects all of them. Process time ignores other processes; its
median is reported. Where wall-clock time is needed, the best round counts, because other load can only slow a round
down. Memory is the peak resident size of a child process, reset just before the step.
"""

import gc
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lm.system.console import Progress
from lm.system.files import write_text
from lm.system.memory import PEAK_RESET, forget_peak, resident
from lm.system.processor import M_MMAP_THRESHOLD, set_malloc

MIB = 1 << 20
Step = Callable[[], object]
Work = Mapping[str, Step]
"""Steps by name. For memory measurements: `STEP`, and `WARM_UP`, a smaller step that allocates what stays."""
WARM_UP, STEP = "warm-up", "step"
Row = dict[str, Any]


class Seconds(NamedTuple):
    """The duration of a step."""

    process: float
    wall: float


def timed(step: Step) -> Seconds:
    process, wall = time.process_time(), time.monotonic()
    step()
    return Seconds(time.process_time() - process, time.monotonic() - wall)


def take_turns(timers: Mapping[str, Callable[[], Seconds]], *, repeats: int) -> dict[str, Seconds]:
    """Median process time and best wall-clock time of each, after one round that is not counted."""
    rounds: list[dict[str, Seconds]] = []
    with Progress(repeats + 1, label="measure", unit="rounds") as progress:
        for _ in range(repeats + 1):
            rounds.append({name: timer() for name, timer in timers.items()})
            progress.advance()
    found = {name: [seconds[name] for seconds in rounds[1:]] for name in timers}
    return {
        name: Seconds(statistics.median(s.process for s in all_), min(s.wall for s in all_))
        for name, all_ in found.items()
    }


def interleaved_medians(steps: Work, *, repeats: int, threads: int = 1) -> dict[str, float]:
    """Median process time of each step.

    With several threads it is the best wall-clock time, because the time of threads that wait is not process time.
    """
    timers = {name: partial(timed, step) for name, step in steps.items()}
    return _of_threads(take_turns(timers, repeats=repeats), threads)


def _of_threads(found: dict[str, Seconds], threads: int) -> dict[str, float]:
    return {name: seconds.process if threads == 1 else seconds.wall for name, seconds in found.items()}


# ---- child processes -----------------------------------------------------------------------------------------------


class Child:
    """A process that runs `make(*arguments)` once, then times its steps on request. `make` must be importable."""

    def __init__(self, make: Callable[..., Work], *arguments: object) -> None:
        self._pool = one_process(_hold, make, *arguments)
        self._pool.submit(gc.collect)  # starts it

    def start(self, name: str) -> Future[Seconds]:
        return self._pool.submit(_time_held, name)

    def seconds(self, name: str) -> Seconds:
        return self.start(name).result()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()


_held: dict[str, Step] = {}
"""In a child process: its steps."""


def _hold(make: Callable[..., Work], *arguments: object) -> None:
    _held.update(make(*arguments))


def _time_held(name: str) -> Seconds:
    return timed(_held[name])


def one_process(initializer: Callable[..., None] | None = None, *arguments: object) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer, initargs=arguments)  # type: ignore[arg-type]


def medians_apart(
    make: Callable[..., Work], names: Sequence[str], *arguments: object, repeats: int, threads: int = 1
) -> dict[str, float]:
    """`interleaved_medians` of the step of each `make(name, *arguments)`, each in its own process."""
    with ExitStack() as stack:
        children = {name: stack.enter_context(Child(make, name, *arguments)) for name in names}
        timers = {name: partial(child.seconds, STEP) for name, child in children.items()}
        return _of_threads(take_turns(timers, repeats=repeats), threads)


def extra_peak_bytes(make: Callable[..., Work], *arguments: object, from_nothing: bool = False) -> int | None:
    """Peak resident size during the step, above the size before it; None where the system does not report it.

    With `from_nothing`, above the size before `make`: weights, optimizer and gradients count too.
    """
    if not PEAK_RESET.exists():
        return None
    with one_process() as pool:
        return pool.submit(_peak_of, make, from_nothing, *arguments).result()


def _peak_of(make: Callable[..., Work], from_nothing: bool, *arguments: object) -> int:
    torch.set_num_threads(1)
    # With a fixed threshold malloc returns every large block to the system at once, so the peak is memory in use.
    set_malloc(M_MMAP_THRESHOLD, 1 << 16)
    nothing = resident("VmRSS")
    work = make(*arguments)
    work[WARM_UP]()
    gc.collect()
    forget_peak(torch.device("cpu"))
    before = nothing if from_nothing else resident("VmRSS")
    work[STEP]()
    return max(0, resident("VmHWM") - before)


# ---- results -------------------------------------------------------------------------------------------------------


def row(name: str, value: float, unit: str, ratio: float | None = None) -> Row:
    """A result for programs; each benchmark defines its `ratio`."""
    return {"name": name, "value": value, "unit": unit, "ratio": ratio}


def write_rows(rows: Iterable[Row], out: str) -> None:
    write_text(Path(out), json.dumps(list(rows), indent=1) + "\n")
