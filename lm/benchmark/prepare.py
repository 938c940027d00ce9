"""`what=prepare`: speed and memory of turning a text file into ids on disk.

The plain way is Python: split lines, count words in a Counter, encode them with a dictionary. The others are the
compiled scanner. One core is compared with the plain way by process time, two cores with one by wall-clock time.
"""

import resource
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import IO

import numpy as np

from lm.benchmark.arguments import fill
from lm.benchmark.measure import Row, Seconds, Step, one_process, row, take_turns, timed, write_rows
from lm.data import fast_encode
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
    """Also time the plain way, which takes most of the benchmark's time."""
    out: str = "benchmark.json"


@dataclass(frozen=True)
class Task:
    """A file to count and encode."""

    part: Part
    rule: TokenRule
    min_count: int

    def plainly(self) -> None:
        """Count in one pass, encode in another. Lines longer than a megabyte are split, to bound the lists."""
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
            content = fast_encode.read_text(text, min_count=self.min_count, scratch=Path(scratch), threads=threads)
            for block in content.splits["train"]:
                file.write(block.ids.data)


def main(pairs: dict[str, str]) -> None:
    settings = fill(PrepareSettings, pairs)
    if settings.rule not in RULES:
        raise UserError(f"rule must be one of {', '.join(RULES)}; got {settings.rule!r}. Try rule=whitespace")
    path = Path(settings.file)
    if not path.is_file():
        raise UserError(f"file must name a text file; got {settings.file!r}. Try file=PATH")
    task = Task(Part(settings.file, partial(_open, path)), RULES[settings.rule], settings.min_count)
    ways: dict[str, Step] = {"plain": task.plainly} if settings.plain else {}
    ways |= {"one core": partial(task.scanned, 1), "two cores": partial(task.scanned, 2)}
    seconds = take_turns({name: partial(timed, way) for name, way in ways.items()}, repeats=settings.repeats)
    megabytes = path.stat().st_size / MEGA
    say(f"{megabytes:,.1f} MB; {settings.repeats} interleaved runs: median process time, best wall-clock time")
    cells = [[name, f"{s.process:.2f}", f"{s.wall:.2f}", f"{megabytes / s.wall:,.0f}"] for name, s in seconds.items()]
    say(table(cells, header=["way", "process s", "wall s", "MB/s"]))
    with one_process() as pool:  # of its own, so that the peak includes Python itself and compiled code
        peak = pool.submit(_peak_of, partial(task.scanned, 2)).result()
    rows = list(report(seconds, peak=peak))
    for name, value, unit, ratio in (found.values() for found in rows):
        say(f"{name}: {ratio:.2f} times as fast" if ratio else f"{name}: {value:,.0f} {unit}")
    write_rows(rows, settings.out)


def _open(path: Path) -> IO[bytes]:
    return path.open("rb")


def _peak_of(way: Step) -> int:
    way()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def report(seconds: dict[str, Seconds], *, peak: int) -> Iterator[Row]:
    """`ratio`: how many times faster than what the name says."""
    one, two = seconds["one core"], seconds["two cores"]
    if plain := seconds.get("plain"):
        yield row("prepare/one_core_against_plain", one.process, "s", plain.process / one.process)
    yield row("prepare/two_cores_against_one", two.wall, "s", one.wall / two.wall)
    yield row("prepare/peak_memory", peak / MEGA, "MB")
