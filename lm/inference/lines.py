"""Text line by line: read with the run's tokenizer in blocks, answered in order.

A block holds about BLOCK_TOKENS tokens, which bounds memory. Its lines are computed longest first, side by side with
lines of similar length.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lm.config.groups import DataConfig
from lm.data.settings import rule_of
from lm.data.text.reading import read_lines
from lm.data.text.subwords import SubwordVocabulary
from lm.data.text.tokenize import TokenRule
from lm.data.text.vocabulary import EOS, UNK, Ids, Vocabulary
from lm.inference.scoring import Span
from lm.model.base import Input
from lm.system.console import Progress, say
from lm.system.errors import UserError
from lm.system.files import json_ready, write_whole

BLOCK_TOKENS = 1 << 16
SHORT = 16
"""Padding a line by this many tokens costs little."""
SNIFFED = 1 << 13
"""The first bytes of a file, which are searched for a zero byte; text has none."""


@dataclass(frozen=True)
class LineBlock:
    """Lines as word ids, one after another, each with its `</s>`; skipped lines are empty."""

    tokens: Ids
    ends: list[int]
    """Where each line ends, after its `</s>`."""
    inputs: Ids | None = None
    """The ids by which the model reads the words, where it reads unknown ones by their letters."""

    def spans(self) -> list[Span]:
        """Each line, read from the zero state. The token before it, its first input, is always a `</s>`."""
        return [(start, start, end) for start, end in pairwise([0, *self.ends])]

    def batches(self, size: int) -> Iterator[list[int]]:
        """Numbers of lines to compute side by side: longest first, none much shorter than half the longest."""
        lengths = np.diff([0, *self.ends]).tolist()
        batch: list[int] = []
        for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
            if batch and (len(batch) == size or 2 * lengths[number] + SHORT < lengths[batch[0]]):
                yield batch
                batch = []
            batch.append(number)
        yield batch

    def split(self, values: Ids) -> list[Ids]:
        """Values of all tokens, by line."""
        return np.split(values, self.ends[:-1])


def read_blocks(
    source: str, *, data: DataConfig, vocabulary: Vocabulary, reader: Input, skip_empty: bool = False
) -> Iterator[LineBlock]:
    """The lines of a file, or of standard input for `-`, to be read by a model's input.

    A line without words is a `</s>` alone; with `skip_empty` it is nothing, as in training.
    """
    rule, enough = rule_of(data), 1 if source == "-" and sys.stdin.isatty() else BLOCK_TOKENS
    pending: list[tuple[Ids, Ids]] = []
    num_lines = num_tokens = 0
    for num_lines, line in enumerate(_open_lines(source), 1):  # noqa: B007 - whether there was any
        words = rule.words(line)
        words = [*words, EOS] if words or not skip_empty else []
        ids = vocabulary.encode(words)
        pending.append((ids, input_ids(reader, words, ids, vocabulary=vocabulary)))
        num_tokens += 1 + len(ids)  # skipped lines take memory too
        if num_tokens >= enough:
            yield _make_block(pending)
            pending, num_tokens = [], 0
    if not num_lines:
        raise UserError(f"input={source} must hold at least one line; it is empty. Put one sentence on each line")
    if pending:
        yield _make_block(pending)


def input_ids(reader: Input, words: Sequence[str], ids: Ids, *, vocabulary: Vocabulary) -> Ids:
    """The ids by which an input reads words: those of the vocabulary, or its own where it can spell the unknown."""
    unknown = np.flatnonzero(ids == vocabulary.unk_id)
    if isinstance(vocabulary, SubwordVocabulary) or not len(unknown):
        return ids
    places = [place for place in unknown.tolist() if words[place] != UNK]
    if (spelt := reader.ids_of_unseen([words[place] for place in places])) is None:
        return ids
    read = ids.copy()
    read[places] = spelt
    return read


def _make_block(lines: Sequence[tuple[Ids, Ids]]) -> LineBlock:
    block = make_block([ids for ids, _ in lines])
    return replace(block, inputs=np.concatenate([read for _, read in lines]))


def make_block(lines: Sequence[Ids]) -> LineBlock:
    return LineBlock(np.concatenate(lines), list(accumulate(map(len, lines))))


def _open_lines(source: str) -> Iterator[str]:
    name = "standard input" if source == "-" else source
    try:
        with contextlib.ExitStack() as stack:
            if source == "-":
                file: BinaryIO = sys.stdin.buffer
                if sys.stdin.isatty():
                    say("Type one sentence per line; Ctrl-D ends.", to=sys.stderr)
            else:
                file = stack.enter_context(Path(source).open("rb"))
            if b"\0" in file.peek(SNIFFED)[:SNIFFED]:  # type: ignore[attr-defined]
                raise UserError(f"input={source} must be text, one sentence per line; {name} is binary.")
            yield from read_lines(file, name=name)
    except OSError as error:
        raise UserError(f"input={source} cannot be read: {error.strerror}. Name a text file, or - for stdin") from None


def read_prompt(prompt: str, *, rule: TokenRule, vocabulary: Vocabulary) -> list[str]:
    """The words of a prompt, with `</s>` at line ends; at least one must be in the vocabulary, unless it is empty."""
    *ended, last = prompt.split("\n")
    words = [word for line in ended if (found := rule.words(line)) for word in [*found, EOS]] + rule.words(last)
    unknown = list(dict.fromkeys(word for word in words if not vocabulary.knows(word)))
    shown = ", ".join(unknown[:10]) + (f" and {len(unknown) - 10} more" if len(unknown) > 10 else "")
    if unknown and not set(words) - {*unknown, EOS}:
        raise UserError(
            f"prompt must hold at least one word that the model knows; got {shown}. The run's vocabulary is the "
            f"{len(vocabulary):,} most frequent words of its training text; try some of those."
        )
    if unknown:
        say(f"Not in the run's vocabulary, read as <unk>: {shown}", to=sys.stderr)
    return words


def write_answers(
    blocks: Iterable[LineBlock], answer: Callable[[LineBlock], Iterable[str]], *, out: str | None
) -> None:
    """Write the answers to each block; progress goes to stderr, unless the answers are shown on the terminal."""

    def answers() -> Iterator[str]:
        if out is None and sys.stdout.isatty():
            for block in blocks:
                yield from answer(block)
            return
        with Progress(None, label="read", unit="lines", to=sys.stderr) as progress:
            for block in blocks:
                yield from answer(block)
                progress.advance(len(block.ends))

    write_lines(answers(), out)


def write_lines(lines: Iterable[str], out: str | None) -> None:
    """To a file, completely or not at all; or to standard output as they come."""
    if out is None:
        for line in lines:
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        return
    try:
        write_whole(Path(out), lambda file: file.writelines(f"{line}\n".encode() for line in lines))
    except OSError as error:
        raise UserError(f"out={out} cannot be written: {error.strerror}. Try another out=PATH") from None


def json_line(values: dict[str, Any]) -> str:
    """One line of JSON. Letters stay readable; control characters, which could steer a terminal, are escaped."""
    line = json.dumps(json_ready(values), ensure_ascii=False)
    return line if line.isprintable() else json.dumps(json_ready(values))
