"""Shared by the benchmarks: interleaved timing, peak memory, arguments and results.

Candidates are timed in turns, so a slow phase of the machine affects all of them. One thread: median process time,
which excludes other processes. Several threads: best wall-clock time, because other load can only slow a round down.
Memory is the peak resident size of a child process, reset just before the step.
"""

import argparse
import gc
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lm.output.clusters.partition import check_cutoffs
from lm.system.console import Progress, say, table
from lm.system.errors import UserError, guarded
from lm.system.files import write_json
from lm.system.memory import M_MMAP_THRESHOLD, PEAK_RESET, reset_peak_memory, resident, set_malloc

Step = Callable[[], object]
Record = dict[str, Any]
"""A table row by column: printed, and written as JSON."""


class Seconds(NamedTuple):
    """Duration of a step."""

    process: float
    wall: float


def timed(step: Callable[..., object], *arguments: object) -> Seconds:
    process, wall = time.process_time(), time.monotonic()
    step(*arguments)
    return Seconds(time.process_time() - process, time.monotonic() - wall)


def take_turns(timers: Mapping[str, Callable[[], Seconds]], *, repeats: int) -> dict[str, Seconds]:
    """Median process time and best wall-clock time of each timer, after one warm-up round."""
    rounds = []
    with Progress(repeats + 1, label="measure", unit="rounds") as progress:
        for _ in range(repeats + 1):
            rounds.append({name: timer() for name, timer in timers.items()})
            progress.advance()
    samples = {name: list(zip(*(seconds[name] for seconds in rounds[1:]), strict=True)) for name in timers}
    return {name: Seconds(statistics.median(process), min(wall)) for name, (process, wall) in samples.items()}


def interleaved_medians(steps: Mapping[str, Step], *, repeats: int, threads: int = 1) -> dict[str, float]:
    """Median process time of each step; with several threads, the best wall-clock time."""
    seconds = take_turns({name: partial(timed, step) for name, step in steps.items()}, repeats=repeats)
    return {name: value[threads > 1] for name, value in seconds.items()}


def start_child(make: Callable[..., Callable[..., object]], *arguments: object) -> ProcessPoolExecutor:
    """Start a process that holds the step `make(*arguments)` for `time_held`. `make` must be importable."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, context, _hold, initargs=(make, *arguments))  # type: ignore[arg-type]


_held: list[Callable[..., object]] = []
"""The step of this child process."""


def _hold(make: Callable[..., Callable[..., object]], *arguments: object) -> None:
    _held.append(make(*arguments))


def time_held(*arguments: object) -> Seconds:
    """In a child process: time its step."""
    return timed(_held[0], *arguments)


def medians_apart(
    make: Callable[..., Step], names: Sequence[str], *arguments: object, repeats: int, threads: int = 1
) -> dict[str, float]:
    """`interleaved_medians` of the steps `make(name, *arguments)`, each in a separate process."""
    with ExitStack() as stack:
        children = {name: stack.enter_context(start_child(make, name, *arguments)) for name in names}
        timers = {name: lambda child=child: child.submit(time_held).result() for name, child in children.items()}
        return {name: value[threads > 1] for name, value in take_turns(timers, repeats=repeats).items()}


def peak_mib(make: Callable[..., Step], *arguments: object) -> float | None:
    """Measure a step's peak memory, including weights, optimizer and gradients; None if unavailable."""
    if not PEAK_RESET.exists():
        return None
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
        return child.submit(_peak_of, make, *arguments).result() / 2**20


def _peak_of(make: Callable[..., Step], *arguments: object) -> int:
    torch.set_num_threads(1)
    # With a fixed threshold malloc returns every large block to the system immediately, so the peak is memory in use.
    set_malloc(M_MMAP_THRESHOLD, 1 << 16)
    before = resident("VmRSS")
    step = make(*arguments)
    step()  # allocates persistent buffers
    gc.collect()
    reset_peak_memory(torch.device("cpu"))
    step()
    return max(0, resident("VmHWM") - before)


def positive(text: str) -> int:
    """Argument type: a positive integer."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {value}")
    return value


def numbers(text: str) -> list[int]:
    """Argument type: integers separated by commas."""
    return [int(part) for part in text.strip(" []").split(",") if part.strip()]


def cutoffs(text: str) -> list[int] | str:
    """Argument type: cutoffs, or `auto` for those that a run would choose."""
    return text if text == "auto" else numbers(text)


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=positive, default=7, help="measured rounds")
    parser.add_argument("--out", default="benchmark.json", help="file to write the results to")
    return parser


def sized_parser(doc: str | None, *, default: str = "2000,10000") -> argparse.ArgumentParser:
    """Return a parser with the sizes of a training step."""
    parser = make_parser(doc)
    parser.add_argument("--counts", default="zipf", help="a file with one word count per line, or zipf")
    parser.add_argument("--vocab", type=positive, default=44_000, help="vocabulary size of the zipf counts")
    parser.add_argument("--cutoffs", type=cutoffs, default=default, help="or auto")
    parser.add_argument("--width", type=positive, default=512, help="of the hidden states")
    parser.add_argument("--embedding", type=positive, default=256)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of matmuls")
    parser.add_argument("--streams", type=positive, default=128)
    parser.add_argument("--bptt", type=positive, default=20)
    parser.add_argument("--threads", type=positive, default=1, help="more than one: needs an idle machine")
    return parser


def zipf_counts(vocab_size: int) -> NDArray[np.int64]:
    """Word counts in proportion to 1 / rank."""
    return np.maximum(1, 10_000_000 // np.arange(1, vocab_size + 1))


def read_counts(arguments: argparse.Namespace) -> NDArray[np.int64]:
    """Decreasing word counts; rejects cutoffs that do not fit them."""
    if arguments.counts == "zipf":
        counts = zipf_counts(arguments.vocab)
    else:
        try:
            counts = -np.sort(-np.loadtxt(arguments.counts, dtype=np.int64, ndmin=1))
        except (OSError, ValueError) as error:
            raise UserError(f"--counts must name a file with one integer per line; {error}.") from None
    if arguments.cutoffs != "auto":
        check_cutoffs(arguments.cutoffs, vocab_size=len(counts))
    return counts


def run(
    measure: Callable[[argparse.Namespace], None], parser: argparse.ArgumentParser, words: Sequence[str] | None
) -> None:
    """Parse arguments (default: sys.argv) and measure; a user's mistake exits with code 2."""
    with guarded():
        arguments = parser.parse_args(words)
        if not os.access(Path(arguments.out).absolute().parent, os.W_OK):
            parser.error(f"--out must be in an existing folder with write permission (runs/?); got {arguments.out}")
        measure(arguments)


def print_records(records: Sequence[Record]) -> None:
    """Print records as a table; a missing value is a dash."""
    columns = list(dict.fromkeys(key for record in records for key in record))
    say(table([[_cell(record.get(column)) for column in columns] for record in records], header=columns))


def _cell(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"


def report(records: Iterable[Record], *, out: str) -> None:
    """Print records as a table and write them to `out`."""
    records = list(records)
    print_records(records)
    write_json(Path(out), records)
