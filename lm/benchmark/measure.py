"""Time and memory that can be compared on a busy machine.

Time is the process's own, so that other processes do not count, and repetitions of the candidates are interleaved, so
that a slow spell hits all of them. Memory is the highest resident size of a child process, reset just before the step.
"""

import ctypes
import gc
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

Step = Callable[[], object]

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def interleaved_medians(steps: Mapping[str, Step], *, repeats: int) -> dict[str, float]:
    """Median seconds of each step, after one untimed round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(repeats + 1):
        for name, step in steps.items():
            start = time.process_time()
            step()
            if round_number:
                seconds[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def extra_peak_bytes(prepare: Callable[..., tuple[Step, Step]], *arguments: object) -> int | None:
    """How far `step` lifts the resident size, where `prepare(*arguments)` gives (a small warm-up, step).

    None where the system does not tell. `prepare` must be importable: it runs in a child process.
    """
    if not CLEAR.exists():
        return None
    # A fixed threshold makes every large block return to the system when freed, so that the peak is what is in use.
    with environment(MALLOC_MMAP_THRESHOLD_="65536"), multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_of, (prepare, *arguments))


def _peak_of(prepare: Callable[..., tuple[Step, Step]], *arguments: object) -> int:
    torch.set_num_threads(1)
    warm_up, step = prepare(*arguments)
    warm_up()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    CLEAR.write_text("5")
    step()
    return max(0, _status("VmHWM") - before)


def _status(key: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024


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
