"""Time and memory that can be compared on a busy machine.

Time is the process's own, so that other processes do not count, and repetitions of the candidates are interleaved, so
that a slow spell hits all of them. Memory is the highest resident size of a child process, reset just before the step.
"""

import gc
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from lm.system.console import Progress
from lm.system.memory import PEAK_RESET, forget_peak, resident

Step = Callable[[], object]


def interleaved_medians(steps: Mapping[str, Step], *, repeats: int) -> dict[str, float]:
    """Median seconds of each step, after one untimed round."""
    return _medians({name: partial(_seconds, step) for name, step in steps.items()}, repeats=repeats)


def medians_apart(
    prepare: Callable[..., tuple[Step, Step]], names: Sequence[str], *arguments: object, repeats: int
) -> dict[str, float]:
    """As `interleaved_medians`, of the steps of `prepare(name, *arguments)`, each in a process set up for it alone."""
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pools = {name: stack.enter_context(spawn.Pool(1, _hold, (prepare, name, *arguments))) for name in names}
        return _medians({name: partial(pool.apply, _held_seconds) for name, pool in pools.items()}, repeats=repeats)


def _medians(timers: Mapping[str, Callable[[], float]], *, repeats: int) -> dict[str, float]:
    rounds = []
    with Progress(repeats + 1, label="measure", unit="rounds") as progress:
        for _ in range(repeats + 1):
            rounds.append({name: timer() for name, timer in timers.items()})
            progress.advance()
    return {name: statistics.median(seconds[name] for seconds in rounds[1:]) for name in timers}


def _seconds(step: Step) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


_held: dict[str, Step] = {}
"""In a child process: the step that it was made for."""


def _hold(prepare: Callable[..., tuple[Step, Step]], *arguments: object) -> None:
    _held["step"] = prepare(*arguments)[1]


def _held_seconds() -> float:
    return _seconds(_held["step"])


def extra_peak_bytes(
    prepare: Callable[..., tuple[Step, Step]], *arguments: object, from_nothing: bool = False
) -> int | None:
    """How far `step` lifts the resident size, where `prepare(*arguments)` gives (a small warm-up, step).

    `from_nothing` counts what `prepare` and the warm-up have left behind too: weights, optimizer, gradients. None where
    the system does not tell. `prepare` must be importable: it runs in a child process.
    """
    if not PEAK_RESET.exists():
        return None
    # A fixed threshold makes every large block return to the system when freed, so that the peak is what is in use.
    with environment(MALLOC_MMAP_THRESHOLD_="65536"), multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_of, (prepare, from_nothing, *arguments))


def _peak_of(prepare: Callable[..., tuple[Step, Step]], from_nothing: bool, *arguments: object) -> int:
    torch.set_num_threads(1)
    nothing = resident("VmRSS")
    warm_up, step = prepare(*arguments)
    warm_up()
    gc.collect()
    forget_peak(torch.device("cpu"))
    before = nothing if from_nothing else resident("VmRSS")
    step()
    return max(0, resident("VmHWM") - before)


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Sets variables of the environment for the processes that are started inside."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
