"""Text to ids at memory speed: every byte is read once, by compiled code, on all cores.

The splits are cut into chunks. Each thread looks up words in its own table, which numbers and counts them. The
numbers go to a temporary file in the order of the text. At the end the tables give the vocabulary, and the file is
copied with each number replaced by the word's id. So memory holds the tables of distinct words and a few chunks,
however long the text or its lines are.

`encode.py` defines what the words are; tests check that both give the same bytes.
"""

import os
import queue
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from lm.data.text.learn import learn_pieces
from lm.data.text.reading import CHUNK_SIZE, Part, Text, TextChunk, total_size
from lm.data.text.subwords import SubwordVocabulary
from lm.data.text.tokenize import SPACES, WHITESPACE, WORD_PATTERN, TokenRule
from lm.data.text.vocabulary import UNK, Ids, Vocabulary
from lm.data.word_table import (
    EOS_NUMBER,
    JOINER,
    LINE_END,
    SINGLE,
    SPACE,
    UNK_NUMBER,
    WORD,
    Bytes,
    Found,
    WordTable,
)
from lm.data.write import Block, Content
from lm.system.console import Progress
from lm.system.jit import compiled

Item = TypeVar("Item")
Result = TypeVar("Result")


def supports(rule: TokenRule) -> bool:
    """Whether the scanner can apply such a rule."""
    return rule.pattern in (WHITESPACE, SPACES, WORD_PATTERN)


def num_cores() -> int:
    """Cores this process may use; more than eight would wait for the single thread that reads and writes."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(8, available or 1)


def read_text(
    text: Text,
    *,
    min_count: int,
    scratch: Path,
    num_pieces: int | None = None,
    threads: int | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> Content:
    """Read all splits and encode them; see `encode.read_text`."""
    scanner = Scanner(text, scratch=scratch, threads=threads or num_cores(), chunk_size=chunk_size)
    scanned = {split: scanner.scan(split) for split in text.splits}
    vocabulary = _vocabulary(scanned["train"].table, min_count=min_count, num_pieces=num_pieces)
    return Content(vocabulary, {split: found.blocks(vocabulary) for split, found in scanned.items()})


def encode_text(
    text: Text, *, vocabulary: Vocabulary, scratch: Path, threads: int | None = None, chunk_size: int = CHUNK_SIZE
) -> dict[str, Iterator[Block]]:
    """Every split, encoded with a given vocabulary when it is iterated over."""
    scanner = Scanner(text, scratch=scratch, threads=threads or num_cores(), chunk_size=chunk_size)

    def blocks(split: str) -> Iterator[Block]:
        yield from scanner.scan(split).blocks(vocabulary)

    return {split: blocks(split) for split in text.splits}


def _vocabulary(table: WordTable, *, min_count: int, num_pieces: int | None) -> Vocabulary:
    """For a word vocabulary, only the words that are kept become Python strings."""
    kept = table.counts >= min_count
    kept[[UNK_NUMBER, EOS_NUMBER]] = True
    numbers = np.flatnonzero(kept)
    frequent = zip(table.words(numbers), table.counts[numbers].tolist(), strict=True)
    rare = [(UNK, int(table.counts[~kept].sum()))]
    words = Vocabulary.from_counts(chain(frequent, rare), min_count=min_count)

    def counts() -> Iterator[tuple[str, int]]:
        return zip(table.all_words(), table.counts.tolist(), strict=True)

    return learn_pieces(words, size=num_pieces, counts=counts)


# ---- reading ---------------------------------------------------------------------------------------------------


class Segment(NamedTuple):
    """A segment of the temporary file: numbers of one table, and how much text they are, as in `Block`."""

    table: int
    num_ids: int
    words: int
    characters: int
    size: int
    part_ends: list[int]


class Batch(NamedTuple):
    """Chunks scanned by one thread."""

    chunks: list[TextChunk]
    table: int
    found: list[Found]
    characters: int


@dataclass
class Scanned:
    """A scanned split: word numbers in a file, to be replaced by ids."""

    file: IO[bytes]
    threads: int
    segments: list[Segment] = field(default_factory=list)
    table: WordTable = field(default_factory=WordTable)
    """All words."""
    numbers: list[npt.NDArray[np.uint32]] = field(default_factory=list)
    """For each thread's table, the numbers of its words in the table of all words."""

    def write(self, batch: Batch, *, marks: "LineMarks | WordMarks") -> None:
        """Append the words found, with the `</s>` that depend on the chunks before."""
        num_ids = words = size = 0
        part_ends: list[int] = []
        for chunk, found in zip(batch.chunks, batch.found, strict=True):
            num_ids += self._append(marks.mark(found))
            words += found.words
            size += len(chunk.data)
            if chunk.last and isinstance(marks, LineMarks):
                part_ends.append(num_ids)
        self.segments.append(Segment(batch.table, num_ids, words, batch.characters, size, part_ends))

    def end(self, marks: "LineMarks | WordMarks") -> None:
        self.segments.append(Segment(0, self._append(marks.end()), 0, 0, 0, []))

    def _append(self, ids: Iterable[Ids]) -> int:
        return sum(self.file.write(numbers.data) for numbers in ids) // 4

    def blocks(self, vocabulary: Vocabulary) -> Iterator[Block]:
        """The split in ids of the vocabulary."""
        replace = self._spell(vocabulary) if isinstance(vocabulary, SubwordVocabulary) else self._look_up(vocabulary)

        def numbers() -> Iterator[tuple[Segment, npt.NDArray[np.uint32]]]:
            self.file.seek(0)
            for segment in self.segments:
                yield segment, np.frombuffer(self.file.read(4 * segment.num_ids), np.uint32)

        def encode(read: tuple[Segment, npt.NDArray[np.uint32]]) -> Block:
            segment, found = read
            return replace(Block(found, *segment[2:]), segment.table)

        yield from in_order(encode, numbers(), threads=self.threads)

    def _look_up(self, vocabulary: Vocabulary) -> Callable[[Block, int], Block]:
        """Replaces the numbers of a thread's table by word ids."""
        numbers = WordTable(vocabulary.words).add(self.table)
        ids = np.where(numbers < len(vocabulary), numbers, vocabulary.unk_id).astype(vocabulary.dtype)
        ids_of = [ids[numbers] for numbers in self.numbers]
        return lambda block, table: block._replace(ids=ids_of[table].take(block.ids))

    def _spell(self, vocabulary: SubwordVocabulary) -> Callable[[Block, int], Block]:
        """Replaces them by the ids of the subword pieces."""
        spelling = vocabulary.spelling(self.table.all_words())
        return lambda block, table: block._replace(ids=self.numbers[table].take(block.ids)).spelt(spelling)


class Scanner:
    """Reads the splits of a text with several threads, each with its own table."""

    def __init__(self, text: Text, *, scratch: Path, threads: int, chunk_size: int) -> None:
        self.text, self.scratch, self.threads, self.chunk_size = text, scratch, threads, chunk_size
        self.kinds = kinds_of(text.rule.pattern, lines=text.sentence_words is None)

    def scan(self, split: str) -> Scanned:
        """Read a whole split."""
        parts, num_words = self.text.splits[split], self.text.sentence_words
        tables = [WordTable() for _ in range(self.threads)]
        idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(self.threads):
            idle.put(number)
        file = tempfile.TemporaryFile(dir=self.scratch)  # noqa: SIM115 - nameless; vanishes with the process
        scanned = Scanned(file, self.threads)
        marks = LineMarks() if num_words is None else WordMarks(num_words)

        def scan_batch(chunks: list[TextChunk]) -> Batch:
            number = idle.get()
            try:
                return self._scan_batch(chunks, number=number, table=tables[number])
            finally:
                idle.put(number)

        with Progress(total_size(parts), label=f"{split}: reading", unit="B") as bar:
            for batch in in_order(scan_batch, self._batches(parts), threads=self.threads):
                scanned.write(batch, marks=marks)
                bar.advance(scanned.segments[-1].size)
        scanned.end(marks)
        scanned.table = tables[0]
        scanned.table.counts[EOS_NUMBER] += marks.added
        own = np.arange(len(scanned.table), dtype=np.uint32)
        scanned.numbers = [own, *(scanned.table.add(tables.pop(1)) for _ in tables[1:])]
        return scanned

    def _batches(self, parts: Iterable[Part]) -> Iterator[list[TextChunk]]:
        """The chunks of the parts in order, small ones together."""
        batch: list[TextChunk] = []
        size = 0
        for chunk in chain.from_iterable(part.chunks(self.chunk_size) for part in parts):
            batch.append(chunk)
            size += len(chunk.data)
            if size >= self.chunk_size:
                yield batch
                batch, size = [], 0
        yield batch

    def _scan_batch(self, chunks: list[TextChunk], *, number: int, table: WordTable) -> Batch:
        found: list[Found] = []
        all_characters = 0
        for chunk in chunks:
            data, characters = self._clean(chunk)
            found.append(table.scan(data, kinds=self.kinds, last=chunk.last and self.text.sentence_words is None))
            all_characters += characters
        return Batch(chunks, number, found, all_characters)

    def _clean(self, chunk: TextChunk) -> tuple[bytes, int]:
        """The chunk as UTF-8, lower-cased if the rule asks for it, and its number of characters.

        Decoding and lower-casing are Python's own and so follow every rule of Unicode: `Σ` has another lower case at
        the end of a word, and `İ` becomes two characters.
        """
        rule, data, markup = self.text.rule, chunk.data, 0
        if rule.skip_markup:
            data, markup = _blank_markup(chunk)
        if data.isascii():
            return data.lower() if rule.lowercase else data, len(data) - markup
        text = self.text.decode(data, name=chunk.name, offset=chunk.offset)
        if rule.lowercase:
            return text.lower().encode(), len(text) - markup
        return text.encode() if self.text.errors == "replace" else data, len(text) - markup


class LineMarks:
    """Adds the `</s>` of lines that span chunks; the tables add those of the other lines."""

    def __init__(self) -> None:
        self.inside = False
        self.added = 0

    def mark(self, found: Found) -> Iterator[Ids]:
        if self.inside and found.bare_end:
            self.added += 1
            yield _MARK
        yield found.ids
        self.inside = found.inside or (self.inside and not found.ended)

    def end(self) -> Iterator[Ids]:
        assert not self.inside, "every part ends its last line"
        yield from ()


class WordMarks:
    """Adds `</s>` after every `num_words` words, and at the end."""

    def __init__(self, num_words: int) -> None:
        self.num_words = num_words
        self.open_words = 0
        self.added = 0

    def mark(self, found: Found) -> Iterator[Ids]:
        ends = np.arange(self.num_words - self.open_words, found.words + 1, self.num_words)
        yield np.insert(found.ids, ends, EOS_NUMBER)
        self.added += len(ends)
        self.open_words = (self.open_words + found.words) % self.num_words

    def end(self) -> Iterator[Ids]:
        if self.open_words:
            self.added += 1
            yield _MARK


_MARK = np.array([EOS_NUMBER], np.uint32)


def in_order(function: Callable[[Item], Result], items: Iterable[Item], *, threads: int) -> Iterator[Result]:
    """`map` with several threads, which work a few items ahead of the consumer."""
    if threads == 1:
        yield from map(function, items)
        return
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


# ---- characters ------------------------------------------------------------------------------------------------


@cache
def kinds_of(pattern: str, *, lines: bool) -> Bytes:
    """The kind of every character under a rule, according to Python's regular expressions."""
    kinds = np.full(0x110000, WORD, np.uint8)
    if pattern == WORD_PATTERN:
        _set(kinds, r"\W", SINGLE)
        _set(kinds, r"[-'’]", JOINER)
    _set(kinds, " " if pattern == SPACES else r"\s", SPACE)
    kinds[ord("\n")] = LINE_END if lines else SPACE
    return kinds


def _set(kinds: Bytes, pattern: str, kind: int) -> None:
    for match in re.finditer(f"(?:{pattern})+", _every_character()):
        kinds[match.start() : match.end()] = kind


@cache
def _every_character() -> str:
    return "".join(map(chr, range(0x110000)))


def _blank_markup(chunk: TextChunk) -> tuple[bytes, int]:
    """The chunk with lines that start with `<` replaced by spaces, and the number of these spaces."""
    data = np.frombuffer(chunk.data, np.uint8).copy()
    count = _blank_lines(data, chunk.continues, chunk.in_markup)
    return data.tobytes(), count


@compiled
def _blank_lines(data: Bytes, continues: bool, in_markup: bool) -> int:
    count, at_start, markup = 0, not continues, in_markup
    for position in range(len(data)):
        byte = data[position]
        if at_start:
            markup = byte == ord("<")
        if markup:
            data[position] = ord(" ")
            count += 1
        at_start = byte == ord("\n")
    return count
