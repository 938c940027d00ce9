"""`what=prepare`: how fast a text file becomes ids on disk, and with how much memory.

The plain way splits lines, counts words in a Counter and encodes them by a dictionary, in plain Python; the others are
the scanner. On one core process times are compared, by their medians. Two cores are compared with one by the clock on
the wall, the best of each, since a busy machine can make a run slower but never faster.
"""

import multiprocessing
import resource
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import IO

import numpy as np

from lm.benchmark.rows import Row, write_rows
from lm.data import scan
from lm.data.text.reading import Part, Text
from lm.data.text.tokenize import SPACES, WHITESPACE, WORD_PATTERN, TokenRule
from lm.data.text.vocabulary import EOS, Vocabulary
from lm.system.console import say, table
from lm.system.errors import UserError

RULES = {
    "whitespace": TokenRule(WHITESPACE),
    "spaces": TokenRule(SPACES),
    "words": TokenRule(WORD_PATTERN, lowercase=True),
}
MEGA = 1e6


@dataclass
class PrepareSettings:
    """Keys of `what=prepare`."""

    file: str = ""
    """A text file."""
    rule: str = "whitespace"
    """whitespace as in Text8, spaces as in One Billion Word, or words, in lower case, as in Europarl."""
    min_count: int = 11
    repeats: int = 5
    plain: bool = True
    """Time the plain way too, which takes most of the benchmark's time."""
    out: str = "benchmark.json"


@dataclass(frozen=True)
class Task:
    """A file to be counted and encoded."""

    part: Part
    rule: TokenRule
    min_count: int

    def plainly(self) -> None:
        """Count in one pass, encode in another; lines longer than a megabyte are cut, as no list should be longer."""
        counts: Counter[str] = Counter()
        for words in self._lines():
            counts.update(words)
        vocabulary = Vocabulary.from_counts(counts.items(), min_count=self.min_count)
        lookup, unk = vocabulary.ids.get, vocabulary.unk_id
        with tempfile.TemporaryFile() as file:
            for words in self._lines():
                file.write(np.array(list(map(lookup, words, repeat(unk))), vocabulary.dtype).tobytes())

    def _lines(self) -> Iterator[list[str]]:
        for chunk in self.part.chunks():
            for line in chunk.data.decode().split("\n"):
                if words := self.rule.words(line):
                    yield [*words, EOS]

    def scanned(self, threads: int) -> None:
        text = Text({"train": [self.part]}, self.rule)
        with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile() as file:
            content = scan.read_text(text, min_count=self.min_count, scratch=Path(scratch), threads=threads)
            for block in content.splits["train"]:
                file.write(block.ids.data)


def run_prepare(settings: PrepareSettings) -> None:
    """Measure, print, write."""
    if settings.rule not in RULES:
        raise UserError(f"rule must be one of {', '.join(RULES)}; got {settings.rule!r}. Try rule=whitespace")
    path = Path(settings.file)
    if not path.is_file():
        raise UserError(f"file must name a text file; got {settings.file!r}. Try file=PATH")
    task = Task(Part(settings.file, partial(_open, path)), RULES[settings.rule], settings.min_count)
    ways: dict[str, Callable[[], None]] = {"plain": task.plainly} if settings.plain else {}
    ways |= {"one core": partial(task.scanned, 1), "two cores": partial(task.scanned, 2)}
    task.scanned(1)  # compiles, and brings the file into memory
    process, wall = time_interleaved(ways, repeats=settings.repeats)
    size = path.stat().st_size
    say(f"{size / MEGA:,.1f} MB; {settings.repeats} interleaved runs: median process time, best time by the clock")
    rows = [[name, f"{process[name]:.2f}", f"{wall[name]:.2f}", f"{size / MEGA / wall[name]:,.0f}"] for name in ways]
    say(table(rows, header=["way", "process s", "wall s", "MB/s"]))
    records = list(report(process, wall, peak=peak_bytes(partial(task.scanned, 2))))
    for name, value, unit, ratio in (record.values() for record in records):
        say(f"{name}: {ratio:.2f} times as fast" if ratio else f"{name}: {value:,.0f} {unit}")
    write_rows(records, settings.out)


def _open(path: Path) -> IO[bytes]:
    return path.open("rb")


def time_interleaved(ways: dict[str, Callable[[], None]], *, repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median of the process's own seconds, and fewest seconds on the wall."""
    process: dict[str, list[float]] = {name: [] for name in ways}
    wall: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            start = time.process_time(), time.monotonic()
            way()
            process[name].append(time.process_time() - start[0])
            wall[name].append(time.monotonic() - start[1])
    medians = {name: statistics.median(seconds) for name, seconds in process.items()}
    return medians, {name: min(seconds) for name, seconds in wall.items()}


def peak_bytes(way: Callable[[], None]) -> int:
    """The most memory that a process of its own has in use; all of it, Python and machine code included."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peak_of, way).result()


def _peak_of(way: Callable[[], None]) -> int:
    way()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def report(process: dict[str, float], wall: dict[str, float], *, peak: int) -> Iterator[Row]:
    """As records; `ratio` says how many times as fast as what the name says."""
    one, two = wall["one core"], wall["two cores"]
    if "plain" in process:
        ratio = process["plain"] / process["one core"]
        yield {"name": "prepare/one_core_against_plain", "value": process["one core"], "unit": "s", "ratio": ratio}
    yield {"name": "prepare/two_cores_against_one", "value": two, "unit": "s", "ratio": one / two}
    yield {"name": "prepare/peak_memory", "value": peak / MEGA, "unit": "MB", "ratio": None}
