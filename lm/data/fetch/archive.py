"""Archives read in place: only regular files of the published layout, never extracted to a path, with bounded sizes.

Names inside an archive are only compared with the layout, so no `../`, absolute path or link can lead anywhere.
"""

import bz2
import gzip
import io
import lzma
import os
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO

from lm.data.fetch.download import check_space
from lm.data.text.reading import Part, explain_damage
from lm.system.console import Progress, byte_size, say
from lm.system.errors import UserError

_COMPRESSIONS: dict[bytes, Callable[[BinaryIO], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"\xfd7zXZ\0": lzma.LZMAFile,
    b"BZh": bz2.BZ2File,
}
"""By a file's first bytes."""
BEGINNINGS = (*_COMPRESSIONS, b"PK")
"""First bytes of every kind of compressed archive."""
_LONGEST_READ = 1 << 24
"""tarfile reads a header in one call; a longer one is an attack."""


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes that the published archive does not exceed, but a decompression bomb does."""

    member: int
    content: int
    """Everything in the archive, including members that are skipped."""


def open_members(archive: Path, *, patterns: Sequence[str], limits: Limits, scratch: Path) -> dict[str, Part]:
    """The regular files of an archive or folder that match one of the patterns, by file name.

    A tar can only be read from front to back, and its order is not the corpus's. So the matching members are copied
    once to a nameless file in `scratch`, which vanishes with the process. Several threads may read it at once.
    """
    if archive.is_dir():
        files = folder_files(archive, patterns=patterns)
        return {name: Part(name, partial(_open, path), size=path.stat().st_size) for name, path in files.items()}
    spool: BinaryIO = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115 - closed with the last of the parts
    parts: dict[str, Part] = {}
    with explain_damage(str(archive)), _decompressed(archive, limit=limits.content) as stream:
        for entry, content in _entries(stream):
            path = PurePosixPath(entry.name)
            if not any(_matches(path, pattern) for pattern in patterns):
                continue
            if path.name in parts:
                raise UserError(
                    f"{str(archive)!r} must hold each file once; it holds {path.name} twice. Download it again"
                )
            _check_size(archive, path.name, size=entry.size, limit=limits.member)
            check_space(scratch, entry.size, purpose=f"reading {str(archive)!r}")
            start = spool.tell()
            shutil.copyfileobj(content, spool, 1 << 20)
            parts[path.name] = Part(path.name, partial(_Slice.open, spool, start, spool.tell()), size=entry.size)
        while stream.read(1 << 20):
            pass  # the tar may end before the compressed file, whose checksum is at the very end
    spool.flush()
    size = byte_size(spool.tell())
    say(f"{archive.name}: {len(parts):,} files, {size} of text, kept in {str(scratch)!r} while it is prepared")
    return parts


def open_zip_member(path: Path, name: str, *, limits: Limits) -> tuple[Callable[[], IO[bytes]], int]:
    """What opens the member of that name, and its size; a file that is no zip is taken for the member itself."""
    with explain_damage(str(path)):
        with path.open("rb") as file:
            if file.read(2) != b"PK":
                return partial(_open, path), path.stat().st_size
        archive = zipfile.ZipFile(path)  # closed with the last file that was opened from it
    found = [info for info in archive.infolist() if info.filename == name]
    if len(found) != 1 or found[0].flag_bits & 1:
        reason = "it is encrypted" if len(found) == 1 else f"it holds {len(found)}"
        raise UserError(f"{str(path)!r} must hold one plain member {name}; {reason}. Download the archive again")
    _check_size(path, name, size=found[0].file_size, limit=limits.member)
    return partial(archive.open, found[0]), found[0].file_size


def folder_files(folder: Path, *, patterns: Sequence[str]) -> dict[str, Path]:
    """The files of a folder that match one of the patterns, by file name."""
    files: dict[str, Path] = {}
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}):
        if path.name in files:
            raise UserError(
                f"{str(folder)!r} must hold each file once; it holds {str(files[path.name])!r} and {str(path)!r}. "
                "Remove one of them, or name its folder with data.archive=PATH"
            )
        files[path.name] = path
    return files


def _open(path: Path) -> IO[bytes]:
    return path.open("rb")


class _Slice(io.RawIOBase):
    """Some bytes of a file, read without moving the file's own position."""

    def __init__(self, file: BinaryIO, start: int, stop: int) -> None:
        self.file, self.start, self.stop, self.position = file, start, stop, start

    @classmethod
    def open(cls, file: BinaryIO, start: int, stop: int) -> BinaryIO:
        return io.BufferedReader(cls(file, start, stop), 1 << 18)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: self.start, os.SEEK_CUR: self.position, os.SEEK_END: self.stop}[whence]
        self.position = max(self.start, begin + offset)
        return self.position - self.start

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = os.pread(self.file.fileno(), max(0, min(len(buffer), self.stop - self.position)), self.position)
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


class _Forward:
    """A stream that is only read forward and only up to a limit: what `tarfile` asks of a file."""

    def __init__(self, path: Path, stream: BinaryIO, *, limit: int, on_read: Callable[[], None]) -> None:
        self.path, self.stream, self.limit, self.on_read = path, stream, limit, on_read
        self.position = 0
        self.latest = b""
        """The result of the last read."""

    def tell(self) -> int:
        return self.position

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _LONGEST_READ:
            raise tarfile.ReadError(f"a header of {size} bytes")
        data = self.latest = self.stream.read(size)
        self.position += len(data)
        if self.position > self.limit:
            raise _too_large(self.path, f"it holds more than {byte_size(self.limit)}", self.limit)
        self.on_read()
        return data

    def seek(self, position: int) -> None:
        if position < self.position:
            raise tarfile.ReadError("a member of negative size")
        while self.position < position and self.read(min(1 << 20, position - self.position)):
            pass  # tarfile notices the end by itself


@contextmanager
def _decompressed(archive: Path, *, limit: int) -> Iterator[_Forward]:
    label = f"reading {archive.name}"
    with archive.open("rb") as file, Progress(archive.stat().st_size, label=label, unit="B") as progress:
        beginning = file.read(6)
        file.seek(0)
        opener = next((opens for magic, opens in _COMPRESSIONS.items() if beginning.startswith(magic)), nullcontext)
        with opener(file) as stream:
            on_read = lambda: progress.advance(file.tell() - progress.count)  # noqa: E731
            yield _Forward(archive, stream, limit=limit, on_read=on_read)


def _entries(stream: _Forward) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
    """The tar's regular files, each to be read before the next."""
    with tarfile.open(fileobj=stream, mode="r:") as tar:  # type: ignore[call-overload]
        while (entry := tar.next()) is not None:
            if entry.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not entry.issparse():
                yield entry, tar.extractfile(entry)
            tar.members.clear()  # tarfile remembers every member; Europarl has 190,000 of them
    # tarfile takes anything that is not a header for the end, but the end is marked by zeros.
    if stream.latest.strip(b"\0") or not stream.latest:
        raise tarfile.ReadError("unexpected end of data")


def _matches(name: PurePosixPath, pattern: str) -> bool:
    # `match` alone would compare only the last parts.
    return len(name.parts) == len(PurePosixPath(pattern).parts) and name.match(pattern)


def _check_size(path: Path, name: str, *, size: int, limit: int) -> None:
    if size > limit:
        raise _too_large(path, f"{name} has {byte_size(size)}", limit)


def _too_large(path: Path, what: str, limit: int) -> UserError:
    return UserError(
        f"{str(path)!r} must be the published archive, in which nothing exceeds {byte_size(limit)}; {what}. Download "
        "it again; to read your own text, use data=text"
    )
