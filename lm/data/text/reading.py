"""Text as bytes: the parts of a split, read line by line, or in chunks for the scanner.

A line ends only at a line feed or where its part ends; a byte-order mark at a file's start is skipped.
"""

import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, Any

from lm.data.text.tokenize import TokenRule
from lm.system.errors import UserError

CHUNK_SIZE = 1 << 20
"""Bytes of a chunk: small enough that it and the frequent words fit into a core's cache."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NAMES = {"utf-8": "UTF-8 text", "ascii": "ASCII text, a-z and spaces"}
_DAMAGE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    RuntimeError,  # an encrypted zip or one of unknown compression; a tar whose headers nest without end
    MemoryError,  # a tar header of absurd size
)


@dataclass(frozen=True)
class TextChunk:
    """Consecutive bytes of a part, cut between words, and between lines unless those are very long."""

    name: str
    """Name of the part."""
    offset: int
    """Where it begins in the file."""
    data: bytes
    continues: bool
    """Begins inside a line."""
    in_markup: bool
    """That line starts with `<`."""
    last: bool
    """Is the last one of its part."""


@dataclass(frozen=True)
class Part:
    """A file of a split, or a range of its bytes."""

    name: str
    """Its name in error messages."""
    open: Callable[[], IO[bytes]]
    start: int = 0
    stop: int | None = None
    size: int | None = None
    """In bytes, if known before it is read."""

    @classmethod
    def plain(cls, path: Path, name: str | None = None) -> "Part":
        """A whole uncompressed file."""
        return cls(name or str(path), lambda: path.open("rb"), size=path.stat().st_size)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Each line with its line feed, and its offset in the file."""
        with self._opened() as file:
            offset = self.start
            for line in _lines(self._blocks(file, CHUNK_SIZE)):
                skip = _mark_length(line, offset=offset)
                yield offset + skip, line[skip:]
                offset += len(line)

    def chunks(self, size: int = CHUNK_SIZE) -> Iterator[TextChunk]:
        """Chunks of about `size` bytes, cut after a line feed or else after a space."""
        with self._opened() as file:
            offset, held = self.start, list[bytes]()
            continues = in_markup = False
            for block, following in pairwise(chain([b""], self._blocks(file, size), [b""])):
                cut = block.rfind(b"\n") + 1 or block.rfind(b" ") + 1 if following else len(block)
                if following and not cut:
                    held.append(block)
                    continue
                data = b"".join([*held, block[:cut]])
                skip = _mark_length(data, offset=offset)
                chunk = TextChunk(self.name, offset + skip, data[skip:], continues, in_markup, last=not following)
                yield chunk
                offset, held = offset + len(data), [block[cut:]]
                in_markup = not data.endswith(b"\n") and (in_markup if continues else chunk.data.startswith(b"<"))
                continues = not data.endswith(b"\n")

    def _blocks(self, file: IO[bytes], size: int) -> Iterator[bytes]:
        position = self.start
        while block := file.read(size if self.stop is None else min(size, self.stop - position)):
            position += len(block)
            yield block

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        with explain_read_errors(self.name), self.open() as file:
            if self.start:
                file.seek(self.start)
            yield file


@dataclass(frozen=True)
class Text:
    """The text of a corpus, and how its bytes become sentences of words."""

    splits: Mapping[str, Sequence[Part]]
    rule: TokenRule
    sentence_words: int | None = None
    """Put `</s>` after this many words and at the end of a split; None puts it after each line that has words."""
    encoding: str = "utf-8"
    """`ascii` or `utf-8`."""
    errors: str = "strict"
    """Invalid bytes: `strict` rejects the file, `replace` substitutes U+FFFD."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Records for meta.json that are only known once the source is opened."""

    def decode(self, data: bytes, *, name: str, offset: int) -> str:
        """Decode bytes that begin at `offset` of the file `name`."""
        try:
            return data.decode(self.encoding, self.errors)
        except UnicodeDecodeError as error:
            problem = _wrong_byte(error, name=name, offset=offset, encoding=self.encoding)
            raise UserError(f"{problem}, or pass data.encoding_errors=replace") from None


def read_lines(file: IO[bytes], *, name: str) -> Iterator[str]:
    """Lines of UTF-8 text as they arrive, also from a pipe or a keyboard; errors give the offset of the bad byte."""
    offset = 0
    for line in file:
        skip = _mark_length(line, offset=offset)
        try:
            yield line[skip:].decode()
        except UnicodeDecodeError as error:
            raise UserError(_wrong_byte(error, name=name, offset=offset + skip, encoding="utf-8")) from None
        offset += len(line)


def _wrong_byte(error: UnicodeDecodeError, *, name: str, offset: int, encoding: str) -> str:
    return (
        f"{name!r} must be {_NAMES[encoding]}; byte {error.object[error.start]:#04x} at offset {offset + error.start} "
        "is not. Convert it, for example with iconv -t UTF-8"
    )


@contextmanager
def explain_damage(name: str) -> Iterator[None]:
    """Turn the exceptions of a damaged archive into one clear message."""
    try:
        yield
    except _DAMAGE as error:
        raise UserError(
            f"{name!r} must be a whole archive or compressed file; reading it failed ({error!r}). Download or copy it "
            "again"
        ) from None


@contextmanager
def explain_read_errors(name: str) -> Iterator[None]:
    """The same for a damaged or unreadable file; every OSError inside is taken for a read error."""
    try:
        with explain_damage(name):
            yield
    except OSError as error:
        raise UserError(f"cannot read {name!r}: {error.strerror or error}. Check its permissions") from None


def total_size(parts: Sequence[Part]) -> int | None:
    """Total bytes of the parts, if all sizes are known."""
    sizes = [part.size for part in parts]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    held: list[bytes] = []
    for block in blocks:
        *ends, rest = block.split(b"\n")
        for end in ends:
            yield b"".join([*held, end, b"\n"])
            held = []
        held.append(rest)
    if line := b"".join(held):
        yield line


def _mark_length(data: bytes, *, offset: int) -> int:
    return len(_BYTE_ORDER_MARK) if offset == 0 and data.startswith(_BYTE_ORDER_MARK) else 0
