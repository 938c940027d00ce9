"""Text as bytes: the parts that a split consists of, read line by line, or in pieces for the scanner.

Lines end at a line feed and nowhere else, and where a part ends; a byte-order mark at a file's start is skipped.
"""

import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import IO

from lm.data.text.tokenize import TokenRule
from lm.system.errors import UserError

PIECE = 1 << 20
"""Bytes of a piece: small enough that it and the frequent words fit a processor's own cache."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NAMES = {"utf-8": "UTF-8 text", "ascii": "ASCII text, a-z and spaces"}
_DAMAGE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    RuntimeError,  # a zip that is encrypted, or compressed in a way of its own; a tar's headers nested without end
)


@dataclass(frozen=True)
class Piece:
    """Bytes that follow each other in a part, cut between words, and between lines unless those are very long."""

    name: str
    """The part's."""
    offset: int
    """Where in the file it begins."""
    data: bytes
    continues: bool
    """It begins inside a line."""
    in_markup: bool
    """That line began with `<`."""
    last: bool
    """The part ends with it."""


@dataclass(frozen=True)
class Part:
    """A file, or a range of its bytes, that is read after the parts before it."""

    name: str
    """What messages call it."""
    open: Callable[[], IO[bytes]]
    start: int = 0
    stop: int | None = None
    size: int | None = None
    """How many bytes it has, where that is known before it is read."""

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Each line, its line feed included, and where in the file it begins."""
        with self._opened() as file:
            offset = self.start
            for line in _lines(self._blocks(file, PIECE)):
                skip = _mark_length(line, offset=offset)
                yield offset + skip, line[skip:]
                offset += len(line)

    def pieces(self, size: int = PIECE) -> Iterator[Piece]:
        """Pieces of about `size` bytes, cut after a line feed or, where none is near, after a space."""
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
                piece = Piece(self.name, offset + skip, data[skip:], continues, in_markup, last=not following)
                yield piece
                offset, held = offset + len(data), [block[cut:]]
                in_markup = not data.endswith(b"\n") and (in_markup if continues else piece.data.startswith(b"<"))
                continues = not data.endswith(b"\n")

    def _blocks(self, file: IO[bytes], size: int) -> Iterator[bytes]:
        position = self.start
        while block := file.read(size if self.stop is None else min(size, self.stop - position)):
            position += len(block)
            yield block

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        with trouble_told(self.name), self.open() as file:
            if self.start:
                file.seek(self.start)
            yield file


@dataclass(frozen=True)
class Text:
    """The text of a corpus, and how its bytes become sentences of words."""

    splits: Mapping[str, Sequence[Part]]
    rule: TokenRule
    sentence_words: int | None = None
    """`</s>` stands after so many words and at a split's end; None puts it after each line that holds words."""
    encoding: str = "utf-8"
    """ASCII, or UTF-8, which is the same for all that is ASCII."""
    errors: str = "strict"
    """What becomes of other bytes: `strict` refuses them, `replace` makes them U+FFFD, as `bytes.decode` does."""

    def decode(self, data: bytes, *, name: str, offset: int) -> str:
        """The characters of some bytes, which begin at that offset of a file."""
        try:
            return data.decode(self.encoding, self.errors)
        except UnicodeDecodeError as error:
            told = _wrong_byte(error, name=name, offset=offset, encoding=self.encoding)
            raise UserError(f"{told}, or pass data.encoding_errors=replace") from None


def read_lines(file: IO[bytes], *, name: str) -> Iterator[str]:
    """The lines of UTF-8 text as they come, also from a pipe or a keyboard; a wrong byte is told by its offset."""
    offset = 0
    for line in file:
        skip = _mark_length(line, offset=offset)
        try:
            yield line[skip:].decode()
        except UnicodeDecodeError as error:
            raise UserError(_wrong_byte(error, name=name, offset=offset + skip, encoding="utf-8")) from None
        offset += len(line)


def _wrong_byte(error: UnicodeDecodeError, *, name: str, offset: int, encoding: str) -> str:
    """What is wrong with bytes that begin at that offset of a file."""
    return (
        f"{name!r} must be {_NAMES[encoding]}; byte {error.object[error.start]:#04x} at offset {offset + error.start} "
        "is not. Convert it, for example with iconv -t UTF-8"
    )


@contextmanager
def explain_damage(name: str) -> Iterator[None]:
    """Turn what the libraries raise on a damaged file into one clear paragraph."""
    try:
        yield
    except _DAMAGE as error:
        raise UserError(
            f"{name!r} must be a whole archive or compressed file; reading it failed ({error!r}). Fetch or copy it anew"
        ) from None


@contextmanager
def trouble_told(name: str) -> Iterator[None]:
    """The same for a damaged file and for one that cannot be read at all; nothing else may fail inside."""
    try:
        with explain_damage(name):
            yield
    except OSError as error:
        raise UserError(f"cannot read {name!r}: {error.strerror or error}. Check its permissions") from None


def total_size(parts: Sequence[Part]) -> int | None:
    """How many bytes the parts have, where that is known of all of them."""
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
