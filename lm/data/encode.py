"""Encode text as token ids: compiled code reads every byte once, on all cores.

Each split is cut into chunks. Every thread numbers and counts words in its own `WordTable`, and the numbers go to a
temporary file in the order of the text. The tables then give the vocabulary, and the file is read again with each
number replaced by the word's id. Memory usage is bounded by the distinct words and a few chunks.
"""

import os
import queue
import re
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from lm.data.source import Chunk, TextFile, decode
from lm.data.text.tokenize import SPACES, WORD_PATTERN, TokenRule
from lm.data.text.vocabulary import UNK, Ids, SubwordVocabulary, Vocabulary, VocabularyRule, learn_pieces
from lm.data.word_table import (
    ANY_LINE_END,
    EOS_NUMBER,
    JOINER,
    LINE_END,
    SINGLE,
    SPACE,
    UNK_NUMBER,
    WORD,
    Bytes,
    WordTable,
)
from lm.system.console import Progress, counted, say
from lm.system.errors import UserError

CHUNK_SIZE = 1 << 20
"""Chunk size in bytes: small enough that a chunk and the frequent words fit into a core's cache."""
SEPARATOR = "\x1f"
"""Separates words found by Python tokenizers; such words may contain spaces."""
MARKUP = re.compile(rb"<(?<![^\n]<).*\n?")
"""Lines that start with `<`; five times as fast as `^<.*`, because the search begins with a fixed byte."""
NO_IDS: Ids = np.empty(0, np.uint32)

Item = TypeVar("Item")
Result = TypeVar("Result")


class Block(NamedTuple):
    """Consecutive ids of a split and the amount of text they represent."""

    ids: Ids
    amounts: Counter[str]
    """Words (without `</s>`), characters (with spaces and line ends), bytes and blank_lines."""
    marks: npt.NDArray[np.uint8] | None = None
    """For subwords: `KNOWN` and `WORD_END` of each id."""


@dataclass(frozen=True)
class Scanned:
    """A split as word numbers in a temporary file, later replaced by ids."""

    file: IO[bytes]
    segments: list[tuple[int, int, Block]]
    """For each part of the file: the thread's table, the number of ids, and the block without its ids."""
    table: WordTable
    """All words, numbered and counted."""
    numbers: list[npt.NDArray[np.uint32]]
    """For each thread's table, the numbers of its words in the table of all words."""

    def vocabulary(self, rule: VocabularyRule) -> Vocabulary:
        """Build a vocabulary of words or subwords from this split."""
        table, counts = self.table, self.table.counts
        # Only words that may be kept become Python strings.
        kept = counts >= (1 if rule.lexicon else rule.min_count)
        kept[[UNK_NUMBER, EOS_NUMBER]] = True
        numbers = np.flatnonzero(kept)
        frequent = zip(table.words(numbers), counts[numbers].tolist(), strict=True)
        rare = [(UNK, int(counts[~kept].sum()))]
        words = Vocabulary.from_counts(chain(frequent, rare), rule)
        _check_words(words, counts, rule)
        if rule.num_pieces is None:
            return words
        return learn_pieces(words, rule.num_pieces, dict(zip(table.all_words(), counts.tolist(), strict=True)))

    def blocks(self, vocabulary: Vocabulary) -> Iterator[Block]:
        """Yield the split as vocabulary ids."""
        replace = self._spell(vocabulary) if isinstance(vocabulary, SubwordVocabulary) else self._look_up(vocabulary)

        def read() -> Iterator[tuple[int, Block]]:
            self.file.seek(0)
            for table, num_ids, block in self.segments:
                yield table, block._replace(ids=np.frombuffer(self.file.read(4 * num_ids), np.uint32))

        yield from in_order(lambda item: replace(*item), read(), threads=len(self.numbers))

    def _look_up(self, vocabulary: Vocabulary) -> Callable[[int, Block], Block]:
        """Return a function that maps the word numbers of a thread's table to word ids."""
        numbers = WordTable(vocabulary.words).add(self.table)
        ids = np.where(numbers < len(vocabulary), numbers, vocabulary.unk_id).astype(vocabulary.dtype)
        ids_of = [ids[numbers] for numbers in self.numbers]
        return lambda table, block: block._replace(ids=ids_of[table].take(block.ids))

    def _spell(self, vocabulary: SubwordVocabulary) -> Callable[[int, Block], Block]:
        """Return a function that maps the word numbers of a thread's table to ids of subword pieces."""
        spelling = vocabulary.spelling(self.table.all_words())

        def spell(table: int, block: Block) -> Block:
            ids, marks = spelling.take(self.numbers[table].take(block.ids))
            return block._replace(ids=ids, marks=marks)

        return spell


def _check_words(words: Vocabulary, counts: npt.NDArray[np.int64], rule: VocabularyRule) -> None:
    """Raise if no training word is in the vocabulary; warn if a text that already has `<unk>` gets more."""
    unknown, ends = (int(words.counts[id_]) for id_ in (words.unk_id, words.eos_id))
    if words.counts.sum() == unknown + ends:
        if rule.lexicon is not None:
            raise UserError("data.vocabulary must contain words of the training text; got none. Check their case.")
        most = int(counts[2:].max(initial=1))
        raise UserError(
            f"data.min_count must be at most {most}, the count of the most frequent training word; got "
            f"{rule.min_count}. Try data.min_count={most}."
        )
    literal = int(counts[UNK_NUMBER])
    if literal and unknown > literal:
        say(
            f"note: the training text contains <unk> {counted(literal, 'time')}, and data.min_count={rule.min_count} "
            f"or another limit turns {unknown - literal:,} more of its words into <unk>. data.min_count=1 keeps the "
            "vocabulary of the text."
        )


def scan_split(
    split: str,
    files: Sequence[TextFile],
    *,
    rule: TokenRule,
    scratch: Path,
    sentence_words: int | None = None,
    errors: str = "strict",
) -> Scanned:
    """Number and count the words of a split with one thread per core; the arguments are those of `Source`."""
    scanner = _Scanner(rule, lines=sentence_words is None, errors=errors)
    file = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115 - deleted with the last reference
    segments: list[tuple[int, int, Block]] = []
    total = None if any(text.size is None for text in files) else sum(text.size or 0 for text in files)
    num_words = num_ends = 0
    with Progress(total, label=f"{split}: reading", unit="B") as progress:
        batches = _batches(files, within_lines=rule.is_compiled and not rule.skip_markup)
        for table, block in in_order(scanner.scan, batches, threads=len(scanner.tables)):
            ids, new_words = block.ids, block.amounts["words"]
            if sentence_words:
                ends = np.arange(sentence_words - num_words % sentence_words, new_words + 1, sentence_words)
                ids = np.insert(ids, ends, EOS_NUMBER)
                num_ends += len(ends)
            file.write(ids.data)
            segments.append((table, len(ids), block._replace(ids=NO_IDS)))
            num_words += new_words
            progress.advance(block.amounts["bytes"])
    if not num_words:
        names = f"{len(files)} files from {files[0].name!r} on" if len(files) > 1 else repr(files[0].name)
        raise UserError(f"The {split} split must contain at least one word; got none from {names}.")
    if sentence_words and num_words % sentence_words:
        file.write(np.full(1, EOS_NUMBER, np.uint32).data)
        segments.append((0, 1, Block(NO_IDS, Counter())))
        num_ends += 1
    words, numbers = scanner.tables[0], [np.arange(len(scanner.tables[0]), dtype=np.uint32)]
    numbers += [words.add(scanner.tables.pop(1)) for _ in scanner.tables[1:]]  # frees each table once it is merged
    words.counts[EOS_NUMBER] += num_ends
    return Scanned(file, segments, words, numbers)


class _Scanner:
    """Scans chunks of text in several threads, each with its own table of words."""

    def __init__(self, rule: TokenRule, *, lines: bool, errors: str) -> None:
        self.rule, self.errors = rule, errors
        line_end = SPACE if not lines else ANY_LINE_END if rule.keep_blank_lines else LINE_END
        self.kinds = kinds_of(rule.pattern if rule.is_compiled else SEPARATOR, line_end=line_end)
        self.tables = [WordTable() for _ in range(num_cores())]
        self.idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        for table in range(len(self.tables)):
            self.idle.put(table)

    def scan(self, chunks: Sequence[Chunk]) -> tuple[int, Block]:
        """Scan chunks; return the index of the table used and the chunks as numbers of its words."""
        table, ids, amounts = self.idle.get(), list[Ids](), Counter[str]()
        try:
            for chunk in chunks:
                text, length = _clean(chunk, rule=self.rule, errors=self.errors)
                if chunk.ends_file and chunk.data and not chunk.data.endswith(b"\n"):
                    text += b"\n"
                chunk_ids, words, blank_lines = self.tables[table].scan(text, kinds=self.kinds)
                ids.append(chunk_ids)
                amounts.update(words=words, characters=length, bytes=len(chunk.data), blank_lines=blank_lines)
        finally:
            self.idle.put(table)
        return table, Block(np.concatenate(ids), amounts)


def num_cores() -> int:
    """Return the number of cores to use; beyond eight, the single reading and writing thread is the bottleneck."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(8, available or 1)


def _batches(files: Iterable[TextFile], *, within_lines: bool) -> Iterator[list[Chunk]]:
    """Yield chunks of the files in order, grouping small ones."""
    batch: list[Chunk] = []
    size = 0
    for chunk in chain.from_iterable(file.chunks(CHUNK_SIZE, within_lines=within_lines) for file in files):
        batch.append(chunk)
        size += len(chunk.data)
        if size >= CHUNK_SIZE // 2:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _clean(chunk: Chunk, *, rule: TokenRule, errors: str) -> tuple[bytes, int]:
    """Return the chunk as UTF-8 and its number of characters.

    Python decodes and lower-cases, so all Unicode rules apply: `Σ` has a different lower case at the end
    of a word, and `İ` becomes two characters.
    """
    data, skipped = chunk.data, 0
    if rule.skip_markup:  # spaces in place of lines that start with `<` keep the offsets of errors right
        data = MARKUP.sub(lambda line: b" " * len(line[0]), data)
        skipped = sum(len(line[0]) for line in MARKUP.finditer(chunk.data))
    if rule.is_compiled and data.isascii() and 0 not in data:
        return data.lower() if rule.lowercase else data, len(data) - skipped
    text = decode(data, errors=errors, name=chunk.name, offset=chunk.offset)
    if rule.is_compiled:
        cleaned = text.lower() if rule.lowercase else text
    else:
        cleaned = "\n".join(SEPARATOR.join(rule.words(line)) for line in text.split("\n"))
    return cleaned.encode(), len(text) - skipped


def in_order(function: Callable[[Item], Result], items: Iterable[Item], *, threads: int) -> Iterator[Result]:
    """Like `map`, with several threads that work a few items ahead of the consumer."""
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


@cache
def kinds_of(pattern: str, *, line_end: int) -> Bytes:
    """Classify every character by a token pattern, using Python's regular expressions; line feeds are `line_end`."""
    kinds = np.full(0x110000, WORD, np.uint8)
    special = {r"\W+": SINGLE, "[-'’]+": JOINER} if pattern == WORD_PATTERN else {}
    special |= {{SPACES: " ", SEPARATOR: SEPARATOR}.get(pattern, r"\s+"): SPACE}
    characters = np.arange(len(kinds), dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")
    for expression, kind in special.items():
        for match in re.finditer(expression, characters):
            kinds[match.start() : match.end()] = kind
    kinds[ord("\n")] = line_end
    return kinds
