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
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from lm.data.encode import tell_of_unknown
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
    **limits: Any,
) -> Content:
    """Read all splits and encode them; see `encode.read_text`."""
    options: dict[str, Any] = {"scratch": scratch, "threads": threads or num_cores(), "chunk_size": chunk_size}
    scanned = {split: scan_split(text, split, **options) for split in text.splits}
    vocabulary = _vocabulary(scanned["train"].table, min_count=min_count, num_pieces=num_pieces, **limits)
    return Content(vocabulary, {split: found.blocks(vocabulary) for split, found in scanned.items()})


def encode_text(
    text: Text, *, vocabulary: Vocabulary, scratch: Path, threads: int | None = None, chunk_size: int = CHUNK_SIZE
) -> dict[str, Iterator[Block]]:
    """Every split, encoded with a given vocabulary when it is iterated over."""

    def blocks(split: str) -> Iterator[Block]:
        scanned = scan_split(text, split, scratch=scratch, threads=threads or num_cores(), chunk_size=chunk_size)
        yield from scanned.blocks(vocabulary)

    return {split: blocks(split) for split in text.splits}


def _vocabulary(table: WordTable, *, min_count: int, num_pieces: int | None, **limits: Any) -> Vocabulary:
    """For a word vocabulary, only the words that may be kept become Python strings."""
    written = int(table.counts[UNK_NUMBER])
    kept = table.counts >= (1 if limits.get("lexicon") else min_count)
    kept[[UNK_NUMBER, EOS_NUMBER]] = True
    numbers = np.flatnonzero(kept)
    frequent = zip(table.words(numbers), table.counts[numbers].tolist(), strict=True)
    rare = [(UNK, int(table.counts[~kept].sum()))]
    words = Vocabulary.from_counts(chain(frequent, rare), min_count=min_count, **limits)
    tell_of_unknown(written, words, min_count=min_count)

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


@dataclass(frozen=True)
class Scanned:
    """A scanned split: word numbers in a file, to be replaced by ids."""

    file: IO[bytes]
    segments: list[Segment]
    table: WordTable
    """All words."""
    numbers: list[npt.NDArray[np.uint32]]
    """For each thread's table, the numbers of its words in the table of all words."""

    def blocks(self, vocabulary: Vocabulary) -> Iterator[Block]:
        """The split in ids of the vocabulary."""
        replace = self._spell(vocabulary) if isinstance(vocabulary, SubwordVocabulary) else self._look_up(vocabulary)

        def read() -> Iterator[tuple[Block, int]]:
            self.file.seek(0)
            for segment in self.segments:
                numbers = np.frombuffer(self.file.read(4 * segment.num_ids), np.uint32)
                yield Block(numbers, *segment[2:]), segment.table

        yield from in_order(lambda item: replace(*item), read(), threads=len(self.numbers))

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


def scan_split(text: Text, split: str, *, scratch: Path, threads: int, chunk_size: int) -> Scanned:
    """Read a whole split with several threads, each with its own table."""
    parts, lines = text.splits[split], text.sentence_words is None
    kinds = kinds_of(text.rule.pattern, lines=lines)
    tables = [WordTable() for _ in range(threads)]
    idle: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(threads):
        idle.put(number)

    def scan(chunks: list[TextChunk]) -> tuple[int, list[tuple[TextChunk, int, Found]]]:
        number, results = idle.get(), []
        try:
            for chunk in chunks:
                data, characters = _clean(chunk, text=text)
                found = tables[number].scan(data, kinds=kinds, last=chunk.last and lines)
                results.append((chunk, characters, found))
        finally:
            idle.put(number)
        return number, results

    file = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115 - nameless; vanishes with the process
    segments: list[Segment] = []
    marks = Marks(text.sentence_words)
    with Progress(total_size(parts), label=f"{split}: reading", unit="B") as bar:
        for number, results in in_order(scan, _batches(parts, chunk_size), threads=threads):
            num_ids = words = characters = size = 0
            part_ends: list[int] = []
            for chunk, length, found in results:
                num_ids += file.write(marks.insert(found).data) // 4
                words, characters, size = words + found.words, characters + length, size + len(chunk.data)
                if chunk.last and lines:
                    part_ends.append(num_ids)
            segments.append(Segment(number, num_ids, words, characters, size, part_ends))
            bar.advance(size)
    segments.append(Segment(0, file.write(marks.end().data) // 4, 0, 0, 0, []))
    table = tables[0]
    table.counts[EOS_NUMBER] += marks.added
    own = np.arange(len(table), dtype=np.uint32)
    return Scanned(file, segments, table, [own, *(table.add(tables.pop(1)) for _ in tables[1:])])


def _batches(parts: Iterable[Part], chunk_size: int) -> Iterator[list[TextChunk]]:
    """The chunks of the parts in order, small ones together."""
    batch: list[TextChunk] = []
    size = 0
    for chunk in chain.from_iterable(part.chunks(chunk_size) for part in parts):
        batch.append(chunk)
        size += len(chunk.data)
        if size >= chunk_size:
            yield batch
            batch, size = [], 0
    yield batch


def _clean(chunk: TextChunk, *, text: Text) -> tuple[bytes, int]:
    """The chunk as UTF-8, lower-cased if the rule asks for it, and its number of characters.

    Decoding and lower-casing are Python's own and so follow every rule of Unicode: `Σ` has another lower case at the
    end of a word, and `İ` becomes two characters.
    """
    rule, data, markup = text.rule, chunk.data, 0
    if rule.skip_markup:
        data, markup = _blank_markup(chunk)
    if data.isascii():
        return data.lower() if rule.lowercase else data, len(data) - markup
    decoded = text.decode(data, name=chunk.name, offset=chunk.offset)
    if rule.lowercase:
        return decoded.lower().encode(), len(decoded) - markup
    return decoded.encode() if text.errors == "replace" else data, len(decoded) - markup


class Marks:
    """Adds the `</s>` that depend on earlier chunks: of lines that span chunks, or after every `num_words` words."""

    def __init__(self, num_words: int | None) -> None:
        self.num_words = num_words
        self.open = 0
        """Words since the last `</s>`; of a line, only whether there are any."""
        self.added = 0

    def insert(self, found: Found) -> Ids:
        if self.num_words is None:
            ends = np.zeros(int(self.open and found.bare_end), np.int64)
            self.open = int(found.inside or (self.open and not found.ended))
        else:
            ends = np.arange(self.num_words - self.open, found.words + 1, self.num_words)
            self.open = (self.open + found.words) % self.num_words
        self.added += len(ends)
        return np.insert(found.ids, ends, EOS_NUMBER) if len(ends) else found.ids

    def end(self) -> Ids:
        """The `</s>` at the end of the split, if one is missing."""
        self.added += self.open > 0
        return np.full(int(self.open > 0), EOS_NUMBER, np.uint32)


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
