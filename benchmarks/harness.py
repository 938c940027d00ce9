"""What the benchmarks share: measurements that hold on a busy machine, arguments, and results.

Candidates are timed in turns, so a slow phase of the machine affects all of them. The median process time is reported,
because it excludes other processes. With several threads it is the best wall-clock time, because other load can only
slow a round down. Memory is the peak resident size of a child process, reset just before the step.
"""

import argparse
import gc
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lm.output.clusters.partition import check_cutoffs
from lm.system.console import Progress, say, table
from lm.system.errors import UserError
from lm.system.files import write_json
from lm.system.memory import M_MMAP_THRESHOLD, PEAK_RESET, reset_peak_memory, resident, set_malloc

MIB = 1 << 20
Step = Callable[[], object]
Record = dict[str, Any]
"""A table row by column: printed, and written as JSON."""


class Seconds(NamedTuple):
    """Duration of a step."""

    process: float
    wall: float


def timed(step: Step) -> Seconds:
    process, wall = time.process_time(), time.monotonic()
    step()
    return Seconds(time.process_time() - process, time.monotonic() - wall)


def take_turns(timers: Mapping[str, Callable[[], Seconds]], *, repeats: int) -> dict[str, Seconds]:
    """Median process time and best wall-clock time of each timer, after one warm-up round."""
    rounds: list[dict[str, Seconds]] = []
    with Progress(repeats + 1, label="measure", unit="rounds") as progress:
        for _ in range(repeats + 1):
            rounds.append({name: timer() for name, timer in timers.items()})
            progress.advance()
    samples = {name: list(zip(*(seconds[name] for seconds in rounds[1:]), strict=True)) for name in timers}
    return {name: Seconds(statistics.median(process), min(wall)) for name, (process, wall) in samples.items()}


def interleaved_medians(steps: Mapping[str, Step], *, repeats: int, threads: int = 1) -> dict[str, float]:
    """Median process time of each step; with several threads, the best wall-clock time."""
    return _pick(take_turns({name: partial(timed, step) for name, step in steps.items()}, repeats=repeats), threads)


def _pick(seconds: dict[str, Seconds], threads: int) -> dict[str, float]:
    return {name: value.process if threads == 1 else value.wall for name, value in seconds.items()}


# ---- child processes -----------------------------------------------------------------------------------------------


class Child:
    """A process that calls `make(*arguments)` once and then times the resulting steps. `make` must be importable."""

    def __init__(self, make: Callable[..., Mapping[str, Step]], *arguments: object) -> None:
        self._pool = one_process(_hold, make, *arguments)
        self._pool.submit(gc.collect)  # starts the process

    def start(self, name: str) -> Future[Seconds]:
        return self._pool.submit(_time_held, name)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()


_held: dict[str, Step] = {}
"""Steps of this child process."""


def _hold(make: Callable[..., Mapping[str, Step]], *arguments: object) -> None:
    _held.update(make(*arguments))


def _time_held(name: str) -> Seconds:
    return timed(_held[name])


def one_process(initializer: Callable[..., None] | None = None, *arguments: object) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer, initargs=arguments)  # type: ignore[arg-type]


def _one_step(make: Callable[..., Step], *arguments: object) -> dict[str, Step]:
    return {"step": make(*arguments)}


def medians_apart(
    make: Callable[..., Step], names: Sequence[str], *arguments: object, repeats: int, threads: int = 1
) -> dict[str, float]:
    """`interleaved_medians` of the steps `make(name, *arguments)`, each in a separate process."""
    with ExitStack() as stack:
        children = {name: stack.enter_context(Child(_one_step, make, name, *arguments)) for name in names}
        timers = {name: lambda child=child: child.start("step").result() for name, child in children.items()}
        return _pick(take_turns(timers, repeats=repeats), threads)


def peak_mib(make: Callable[..., Step], *arguments: object) -> float | None:
    """Peak memory of a step, including weights, optimizer and gradients; None if the system does not report it."""
    if not PEAK_RESET.exists():
        return None
    with one_process() as pool:
        return pool.submit(_peak_of, make, *arguments).result() / MIB


def _peak_of(make: Callable[..., Step], *arguments: object) -> int:
    torch.set_num_threads(1)
    # With a fixed threshold malloc returns every large block to the system immediately, so the peak is memory in use.
    set_malloc(M_MMAP_THRESHOLD, 1 << 16)
    before = resident("VmRSS")
    step = make(*arguments)
    step()  # allocates what stays
    gc.collect()
    reset_peak_memory(torch.device("cpu"))
    step()
    return max(0, resident("VmHWM") - before)


# ---- arguments -----------------------------------------------------------------------------------------------------


def number(text: str) -> int:
    """Argument type: a positive integer that cannot exhaust memory before anything is measured."""
    if not 1 <= (value := int(text)) <= 10**9:
        raise argparse.ArgumentTypeError(f"must be from 1 to 1,000,000,000; got {value}")
    return value


def numbers(text: str) -> list[int]:
    """Argument type: integers separated by commas."""
    return [int(part) for part in text.strip("[]").split(",") if part.strip()]


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("--repeats", type=number, default=7, help="measured rounds")
    parser.add_argument("--out", default="benchmark.json", help="file to write the results to")
    return parser


def sized_parser(doc: str | None, *, cutoffs: str = "2000,10000") -> argparse.ArgumentParser:
    """A parser with the sizes of a training step."""
    parser = make_parser(doc)
    parser.add_argument("--counts", default="zipf", help="a file with one word count per line, or zipf")
    parser.add_argument("--vocab", type=number, default=44_000, help="vocabulary size of the zipf counts")
    parser.add_argument("--cutoffs", type=numbers, default=cutoffs)
    parser.add_argument("--width", type=number, default=512, help="of the hidden states")
    parser.add_argument("--embedding", type=number, default=256)
    parser.add_argument("--streams", type=number, default=128)
    parser.add_argument("--bptt", type=number, default=20)
    parser.add_argument("--threads", type=number, default=1, help="more than one: needs an idle machine")
    return parser


def read_counts(arguments: argparse.Namespace) -> NDArray[np.int64]:
    """Decreasing word counts; rejects cutoffs that do not fit them."""
    if arguments.counts == "zipf":
        counts: NDArray[np.int64] = np.maximum(1, 10_000_000 // np.arange(1, arguments.vocab + 1))
    else:
        counts = -np.sort(-read_numbers("--counts", arguments.counts))
    check_cutoffs(arguments.cutoffs, vocab_size=len(counts))
    return counts


def read_numbers(option: str, path: str) -> NDArray[np.int64]:
    """A file with one integer per line."""
    try:
        return np.loadtxt(path, dtype=np.int64, ndmin=1)
    except (OSError, ValueError) as error:
        raise UserError(f"{option} must name a file with one integer per line; got {path!r}: {error}.") from None


def run(main: Callable[[argparse.Namespace], None], parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Parse and run; a user's mistake is printed and gives exit code 2."""
    try:
        arguments = parser.parse_args(words)
        if not Path(arguments.out).absolute().parent.is_dir():
            parser.error(f"--out must be in an existing folder; got {arguments.out}")
        main(arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except SystemExit as ending:
        return int(ending.code or 0)
    return 0


# ---- results -------------------------------------------------------------------------------------------------------


def ratio(seconds: Mapping[str, float], numerator: str, denominator: str) -> float | None:
    return seconds[numerator] / seconds[denominator] if numerator in seconds else None


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
