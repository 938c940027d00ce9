"""Text line by line: read with the run's tokenizer in blocks, answered in order.

A block holds about BLOCK_TOKENS tokens, which bounds memory. Its lines are computed longest first, side by side with
lines of similar length.
"""

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lm.config.groups import DataConfig
from lm.data.settings import rule_of
from lm.data.source import read_lines
from lm.data.text.subwords import SubwordVocabulary
from lm.data.text.tokenize import TokenRule
from lm.data.text.vocabulary import EOS, UNK, Ids, Vocabulary
from lm.model.predictor import Predictor
from lm.model.scoring import Span
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


def read_words(source: str, *, data: DataConfig, skip_empty: bool = False) -> Iterator[list[str]]:
    """The words of each line of a file, or of standard input for `-`, and `</s>`.

    A line without words is a `</s>` alone; with `skip_empty` it is nothing, as in training.
    """
    rule = rule_of(data)
    for line in open_lines(source):
        words = rule.words(line)
        yield [*words, EOS] if words or not skip_empty else []


def make_blocks(
    lines: Iterable[Sequence[str]], *, source: str, vocabulary: Vocabulary, reader: Predictor
) -> Iterator[LineBlock]:
    """Lines of words, of which a keyboard's are answered one by one, to be read by a model."""
    enough = 1 if source == "-" and sys.stdin.isatty() else BLOCK_TOKENS
    pending: list[Ids] = []
    inputs: list[Ids] = []
    num_tokens = 0
    for words in lines:
        pending.append(vocabulary.encode(words))
        inputs.append(input_ids(reader, words, pending[-1], vocabulary=vocabulary))
        num_tokens += 1 + len(pending[-1])  # skipped lines take memory too
        if num_tokens >= enough:
            yield make_block(pending, inputs)
            pending, inputs, num_tokens = [], [], 0
    if pending:
        yield make_block(pending, inputs)


def input_ids(reader: Predictor, words: Sequence[str], ids: Ids, *, vocabulary: Vocabulary) -> Ids:
    """The ids by which a model reads words: those of the vocabulary, or its own where it can spell the unknown."""
    unknown = np.flatnonzero(ids == vocabulary.unk_id)
    if isinstance(vocabulary, SubwordVocabulary) or not len(unknown):
        return ids
    places = [place for place in unknown.tolist() if words[place] != UNK]
    if (spelt := reader.ids_of_unseen([words[place] for place in places])) is None:
        return ids
    read = ids.copy()
    read[places] = spelt
    return read


def make_block(lines: Sequence[Ids], inputs: Sequence[Ids] | None = None) -> LineBlock:
    """Lines of ids that end with `</s>`, or are empty; `inputs` are those by which the model reads them."""
    ends = list(accumulate(map(len, lines)))
    return LineBlock(np.concatenate(lines), ends, None if inputs is None else np.concatenate(inputs))


def open_lines(source: str) -> Iterator[str]:
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
            empty = True
            for line in read_lines(file, name=name):
                empty = False
                yield line
            if empty:
                raise UserError(
                    f"input={source} must hold at least one line; it is empty. Put one sentence on each line"
                )
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


def with_progress(blocks: Iterable[LineBlock], *, out: str | None) -> Iterator[LineBlock]:
    """The blocks; progress goes to stderr, unless the answers are shown on the terminal."""
    if out is None and sys.stdout.isatty():
        yield from blocks
        return
    with Progress(None, label="read", unit="lines", to=sys.stderr) as progress:
        for block in blocks:
            yield block
            progress.advance(len(block.ends))


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
