"""Text from outside, line by line: read by the run's rule, computed in blocks, answered in order, a line at a time.

A block is as many lines as hold about BLOCK_TOKENS words. Its lines are computed longest first, those of about the
same length side by side; memory is bounded by a block or by the longest line.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lm.config.groups import DataConfig
from lm.data.settings import rule_of
from lm.data.text.reading import read_lines
from lm.data.text.tokenize import TokenRule
from lm.data.text.vocabulary import EOS, Ids, Vocabulary
from lm.inference.scoring import Piece
from lm.system.console import Progress, say
from lm.system.errors import UserError
from lm.system.files import json_ready, write_whole

BLOCK_TOKENS = 1 << 16
SHORT = 16
"""Tokens that it costs little to pad a line with."""
SNIFFED = 1 << 13
"""Bytes at the start of a text that are looked at for a zero byte, which no text holds."""


@dataclass(frozen=True)
class LineBlock:
    """Lines as word ids, one after another, `</s>` after each that is not passed over."""

    tokens: Ids
    ends: list[int]
    """Where each line ends, its `</s>` included."""

    def pieces(self) -> list[Piece]:
        """Each line from the zero state. The token before it, its first input, is always a `</s>`."""
        return [(start, start, end) for start, end in pairwise([0, *self.ends])]

    def batches(self, size: int) -> Iterator[list[int]]:
        """The numbers of lines to compute side by side: longest first, none much shorter than half the longest."""
        lengths = np.diff([0, *self.ends]).tolist()
        batch: list[int] = []
        for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
            if batch and (len(batch) == size or 2 * lengths[number] + SHORT < lengths[batch[0]]):
                yield batch
                batch = []
            batch.append(number)
        yield batch

    def lines(self, values: Ids) -> list[Ids]:
        """What was computed for each token, by line."""
        return np.split(values, self.ends[:-1])


def read_blocks(
    source: str, *, data: DataConfig, vocabulary: Vocabulary, pass_over: bool = False
) -> Iterator[LineBlock]:
    """The lines of a file or, for `-`, of standard input; refuses what is empty or not text.

    A line without words is a `</s>` alone, or nothing where it is to be passed over, as in training.
    """
    rule, enough = rule_of(data), 1 if source == "-" and sys.stdin.isatty() else BLOCK_TOKENS
    pending: list[Ids] = []
    num_lines = num_tokens = 0
    for num_lines, line in enumerate(_open_lines(source), 1):  # noqa: B007 - whether there was any
        words = rule.words(line)
        pending.append(vocabulary.encode([*words, EOS] if words or not pass_over else []))
        num_tokens += 1 + len(pending[-1])  # lines that are passed over take memory too
        if num_tokens >= enough:
            yield make_block(pending)
            pending, num_tokens = [], 0
    if not num_lines:
        raise UserError(f"input={source} must hold at least one line; it is empty. Put a sentence on each line")
    if pending:
        yield make_block(pending)


def make_block(lines: Sequence[Ids]) -> LineBlock:
    return LineBlock(np.concatenate(lines), list(accumulate(map(len, lines))))


def _open_lines(source: str) -> Iterator[str]:
    name = "standard input" if source == "-" else source
    try:
        with contextlib.ExitStack() as stack:
            if source == "-":
                file: BinaryIO = sys.stdin.buffer
                if sys.stdin.isatty():
                    say("Reading a sentence a line from the keyboard; Ctrl-D ends.", to=sys.stderr)
            else:
                file = stack.enter_context(Path(source).open("rb"))
            if b"\0" in file.peek(SNIFFED)[:SNIFFED]:  # type: ignore[attr-defined]
                raise UserError(
                    f"input={source} must be text, a sentence a line; {name} holds zero bytes: it is binary."
                )
            yield from read_lines(file, name=name)
    except OSError as error:
        raise UserError(f"input={source} cannot be read: {error.strerror}. Name a text file, or - for stdin") from None


def read_prompt(prompt: str, *, rule: TokenRule, vocabulary: Vocabulary) -> list[str]:
    """The words of a prompt, `</s>` where a line ends; refuses one that the model can make nothing of."""
    *ended, last = prompt.split("\n")
    words = [word for line in ended if (found := rule.words(line)) for word in [*found, EOS]] + rule.words(last)
    unknown = [word for word in words if not vocabulary.knows(word)]
    different = list(dict.fromkeys(unknown))
    told = ", ".join(different[:10]) + (f" and {len(different) - 10} more" if len(different) > 10 else "")
    if unknown and not set(words) - {*unknown, EOS}:
        raise UserError(
            f"prompt must hold at least one word that the model knows; got {told}. The run's vocabulary has "
            f"{len(vocabulary):,} words, the most frequent of its training text; try some of those."
        )
    if unknown:
        say(f"Not in the run's vocabulary, read as <unk>: {told}", to=sys.stderr)
    return words


def write_lines(lines: Iterable[str], out: str | None) -> None:
    """To a file, whole or not at all, or to standard output as they come."""
    if out is None:
        for line in lines:
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        return
    try:
        write_whole(Path(out), lambda file: file.writelines(f"{line}\n".encode() for line in lines))
    except OSError as error:
        raise UserError(f"out={out} cannot be written: {error.strerror}. Try out=PATH with another") from None


def json_line(values: dict[str, Any]) -> str:
    """One line of JSON; readable letters stay as they are, what could steer a terminal does not."""
    line = json.dumps(json_ready(values), ensure_ascii=False)
    return line if line.isprintable() else json.dumps(json_ready(values))


@contextlib.contextmanager
def progress(out: str | None) -> Iterator[Callable[[int], None]]:
    """Tells on stderr how many lines are done, unless the terminal shows the lines themselves."""
    if out is None and sys.stdout.isatty():
        yield lambda _: None
        return
    with Progress(None, label="read", unit="lines", to=sys.stderr) as bar:
        yield bar.advance
