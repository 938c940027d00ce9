"""Number and count the words of UTF-8 text in compiled code.

Words are numbered by first occurrence. A word is stored as its letters, a 24-byte record and a
hash-table slot; it becomes a Python string only on request.
"""

from collections.abc import Iterable, Iterator
from mmap import mmap
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lm.data.text.vocabulary import EOS, UNK
from lm.system.errors import UserError
from lm.system.jit import compiled, inlined

SPACE, WORD, JOINER, SINGLE, LINE_END, ANY_LINE_END = range(6)
"""Kinds of characters: between words; in words; in words if both neighbors are; words by themselves; line feeds, which
end lines with words, or all lines."""
UNK_NUMBER, EOS_NUMBER = 0, 1
"""Every table starts with `<unk>` and `</s>`."""

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]

RECORD = np.dtype([("hash", "u8"), ("count", "i8"), ("start", "u4"), ("length", "u4")])
"""A word: its letters are `letters[start:][:length]`."""
MAX_LETTERS = 1 << 32
PROGRESS = np.dtype([(name, "i8") for name in ("position", "ids", "line_ends", "blank_lines", "inside")])
"""State of a scan: the byte reached, the ids written, the `</s>` among them, the lines without words, and whether the
current line has words."""
WORD_PER_LINE = np.full(0x110000, WORD, np.uint8)
"""Character kinds for one word per line: only the line feed separates."""
WORD_PER_LINE[ord("\n")] = SPACE


class Arrays(NamedTuple):
    """The memory of a table."""

    slots: npt.NDArray[np.int32]
    """Hash table of 1 + a word's number, 0 if free; at most three quarters full."""
    records: npt.NDArray[Any]
    letters: Bytes
    used: Numbers
    """Number of records and of letters in use."""


class WordTable:
    """Words by number, with their counts, including `<unk>` and `</s>`."""

    def __init__(self, words: Iterable[str] = (UNK, EOS)) -> None:
        slots, records, letters = _zeros(1 << 16, np.int32), _zeros(3 << 14, RECORD), _zeros(1 << 20, np.uint8)
        self.arrays = Arrays(slots, records, letters, np.zeros(2, np.int64))
        self.scan("\n".join(words).encode(), kinds=WORD_PER_LINE)
        self.counts[:] = 0

    def __len__(self) -> int:
        return int(self.arrays.used[0])

    @property
    def counts(self) -> Numbers:
        """Occurrences of each word, by number."""
        counts: Numbers = self.arrays.records["count"][: len(self)]
        return counts

    def words(self, numbers: Numbers) -> Iterator[str]:
        """Look up words by number."""
        records, letters = self.arrays.records, self.arrays.letters.data
        for some in np.array_split(numbers, 1 + len(numbers) // 10_000):  # one list of all would need much memory
            for start, length in records[some][["start", "length"]].tolist():
                yield str(letters[start : start + length], "utf-8")

    def all_words(self) -> Iterator[str]:
        """Return all words in numerical order."""
        return self.words(np.arange(len(self)))

    def scan(self, text: bytes, *, kinds: Bytes) -> tuple[npt.NDArray[np.uint32], int, int]:
        """Count the words of valid UTF-8; return their numbers, with `</s>` after lines.

        Also returns the number of words and of blank lines.
        """
        data = np.frombuffer(text, np.uint8)
        ids = np.empty(len(data) + 1, np.uint32)
        progress = np.zeros(1, PROGRESS)
        while not _scan(data, kinds, self.arrays, ids, progress):
            self._grow(num_letters=len(data))
        _, num_ids, line_ends, blank_lines, _ = progress[0].tolist()
        self.counts[EOS_NUMBER] += line_ends
        return ids[:num_ids], num_ids - line_ends, blank_lines

    def add(self, other: "WordTable") -> npt.NDArray[np.uint32]:
        """Add another table's words and counts; return their numbers in this table."""
        _, records, letters, (num_words, num_letters) = other.arrays
        ends = records["start"][:num_words].astype(np.int64) + records["length"][:num_words]
        text = np.insert(letters[:num_letters], ends, ord("\n")).tobytes()
        numbers, _, _ = self.scan(text, kinds=WORD_PER_LINE)
        self.counts[numbers] += other.counts - 1  # the scan counts each word once
        return numbers.copy()  # without the rest of the buffer

    def _grow(self, *, num_letters: int) -> None:
        """Make room for more words and for `num_letters` more letters."""
        slots, records, letters, used = self.arrays
        num_words, letters_used = used.tolist()
        if letters_used + num_letters > MAX_LETTERS:
            raise UserError("The text must not contain more than 4 GB of distinct words; it does. Is it text?")
        if letters_used + num_letters > len(letters):
            letters = _zeros(4 * letters_used + num_letters, np.uint8)
            letters[:letters_used] = self.arrays.letters[:letters_used]
        if num_words == len(records):
            slots, records = _zeros(2 * len(slots), np.int32), _zeros(2 * num_words, RECORD)
            records[:num_words] = self.arrays.records
            _fill_slots(slots, records)
        self.arrays = Arrays(slots, records, letters, used)


def _zeros(length: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Map zeroed memory, allocated on first write and returned to the system when freed."""
    return np.frombuffer(mmap(-1, length * np.dtype(dtype).itemsize), dtype)


# ---- compiled code ---------------------------------------------------------------------------------------------


@compiled
def _scan(data: Bytes, kinds: Bytes, table: Arrays, ids: npt.NDArray[np.uint32], progress: npt.NDArray[Any]) -> bool:
    """Continue from `progress`; return False if the table must grow first."""
    at = progress[0]
    position, num_ids, line_ends, inside, size = at.position, at.ids, at.line_ends, at.inside, len(data)
    blank_lines = at.blank_lines
    has_room = True
    while position < size and has_room:
        width = 1
        kind = kinds[data[position]]
        if data[position] >= 0x80:
            code, width = _character(data, position)
            kind = kinds[code]
        if kind == SPACE:
            position += width
        elif kind >= LINE_END:
            position += width
            ids[num_ids] = EOS_NUMBER
            ends = 1 if kind == ANY_LINE_END else inside
            num_ids += ends
            line_ends += ends
            blank_lines += 1 - inside
            inside = 0
        else:
            end = _end_of_word(data, position, kinds) if kind == WORD else position + width
            mixed = _hash(data, position, end)
            number, slot = _find(table, data, position, end, mixed)
            if number < 0:
                number = _add_word(table, data, position, end, mixed, slot)
                has_room = number >= 0
            if has_room:
                table.records[number].count += 1
                ids[num_ids] = number
                num_ids += 1
                inside, position = 1, end
    at.position, at.ids, at.line_ends, at.blank_lines, at.inside = position, num_ids, line_ends, blank_lines, inside
    return has_room


@inlined
def _end_of_word(data: Bytes, position: int, kinds: Bytes) -> int:
    """Return where the word that begins at `position` ends."""
    while position < len(data):
        if data[position] < 0x80 and kinds[data[position]] == WORD:  # the fast path for most text
            position += 1
        else:
            more = _more(data, position, kinds)
            if more == 0:
                break
            position += more
    return position


@inlined
def _hash(data: Bytes, start: int, end: int) -> Any:
    """Hash eight bytes at a time; words of the same length up to eight bytes never collide."""
    mixed, eight = np.uint64(0), np.uint64(0)
    for position in range(start, end):
        eight = eight << np.uint64(8) | np.uint64(data[position])
        if (position + 1 - start) & 7 == 0:
            mixed, eight = _mix(mixed ^ eight), np.uint64(0)
    return _mix(mixed ^ eight)


@compiled
def _more(data: Bytes, position: int, kinds: Bytes) -> int:
    """Return how many bytes continue the word: a word character, possibly after a joiner; 0 if it ends."""
    code, width = _character(data, position)
    if kinds[code] == WORD:
        return width
    if kinds[code] == JOINER and position + width < len(data):
        after, after_width = _character(data, position + width)
        if kinds[after] == WORD:
            return width + after_width
    return 0


@compiled
def _character(data: Bytes, position: int) -> tuple[Any, int]:
    """Return the code point at `position`, and its number of bytes."""
    first = np.int64(data[position])
    if first < 0x80:
        return first, 1
    second = data[position + 1] & 0x3F
    if first < 0xE0:
        return (first & 0x1F) << 6 | second, 2
    third = data[position + 2] & 0x3F
    if first < 0xF0:
        return (first & 0x0F) << 12 | second << 6 | third, 3
    return (first & 0x07) << 18 | second << 12 | third << 6 | data[position + 3] & 0x3F, 4


@compiled
def _mix(value: Any) -> Any:
    """Mix 64 bits bijectively: multiply by an odd factor, then fold the high half into the low one."""
    value *= np.uint64(0x9E3779B97F4A7C15)
    return value ^ (value >> np.uint64(32))


@compiled
def _find(table: Arrays, data: Bytes, start: Any, end: Any, mixed: Any) -> tuple[Any, Any]:
    """Return the number of the word `data[start:end]`, or -1, and its slot or the free slot for it."""
    mask = np.uint64(len(table.slots) - 1)
    slot = mixed & mask
    length = end - start
    while table.slots[slot]:
        number = np.int64(table.slots[slot] - 1)
        record = table.records[number]
        if record.hash == mixed and record.length == length:
            same = 0
            if length > 8:  # up to eight bytes the hash is unique
                letters_start = np.int64(record.start)
                while same < length and table.letters[letters_start + same] == data[start + same]:
                    same += 1
            if length <= 8 or same == length:
                return number, slot
        slot = (slot + np.uint64(1)) & mask
    return -1, slot


@compiled
def _add_word(table: Arrays, data: Bytes, start: Any, end: Any, mixed: Any, slot: Any) -> int:
    """Add the word `data[start:end]` at a free slot and return its number; -1 if there is no room."""
    number, letters_used = table.used
    if number == len(table.records) or letters_used + end - start > len(table.letters):
        return -1
    for offset in range(end - start):
        table.letters[letters_used + offset] = data[start + offset]
    record = table.records[number]
    record.hash, record.start, record.length, record.count = mixed, letters_used, end - start, 0
    table.slots[slot] = number + 1
    table.used[0] += 1
    table.used[1] += end - start
    return number  # type: ignore[no-any-return]


@compiled
def _fill_slots(slots: npt.NDArray[np.int32], records: npt.NDArray[Any]) -> None:
    """Insert the first half of the records, which are in use, into empty slots."""
    mask = np.uint64(len(slots) - 1)
    for number in range(len(records) // 2):
        slot = records[number].hash & mask
        while slots[slot]:
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = number + 1
