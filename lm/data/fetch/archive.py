"""Archives read in place: only regular files of the published layout, never extracted to a path, never without bound.

Names inside an archive are compared with the layout and used for nothing else, so no `../`, no absolute path and no
link can lead anywhere. Members of a tar may be read by several threads at once.
"""

import bz2
import gzip
import io
import lzma
import os
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from lm.data.fetch.download import check_space
from lm.data.text.reading import explain_damage
from lm.system.console import Progress, byte_size, say
from lm.system.errors import UserError

_COMPRESSIONS: dict[bytes, Callable[[BinaryIO], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"\xfd7zXZ\0": lzma.LZMAFile,
    b"BZh": bz2.BZ2File,
}
"""By what a file begins with."""
BEGINNINGS = (*_COMPRESSIONS, b"PK")
"""Of every kind of archive, zip included."""
_LONGEST_READ = 1 << 24
"""Headers are read at once, and are far shorter."""


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes beyond which an archive is not the published one, but a bomb."""

    member: int
    content: int
    """Everything in the archive, also what is passed over."""


@dataclass(frozen=True)
class Member:
    """A file of an archive or folder, which any number of threads may open and read at once."""

    name: str
    size: int
    file: Path | BinaryIO
    """The file itself, or the one that holds it from `start` on."""
    start: int = 0

    def open(self, start: int = 0, stop: int | None = None) -> BinaryIO:
        """Its bytes, or those from `start` to `stop`."""
        file = self.file.open("rb") if isinstance(self.file, Path) else self.file
        stop = self.size if stop is None else min(stop, self.size)
        stretch = _Stretch(file, self.start + start, self.start + stop, owned=isinstance(self.file, Path))
        return io.BufferedReader(stretch, 1 << 18)


Members = dict[str, Member]
"""By file name."""


def open_members(archive: Path, *, patterns: Sequence[str], limits: Limits, scratch: Path) -> Members:
    """The archive's or folder's regular files that match one of the patterns, by file name.

    A tar can only be read from its beginning on, and its order is not the corpus's. So the wanted members are
    copied once to a file in `scratch` that has no name and vanishes with the process.
    """
    if archive.is_dir():
        files = folder_files(archive, patterns=patterns)
        return {name: Member(name, path.stat().st_size, path) for name, path in files.items()}
    # Held open by the members, closed with the last of them.
    spool: BinaryIO = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115
    members: Members = {}
    with explain_damage(str(archive)), _unpacked(archive, limit=limits.content) as stream:
        for entry in _entries(stream):
            name = PurePosixPath(entry.name)
            if not _is_plain(entry) or not any(_matches(name, pattern) for pattern in patterns):
                continue
            _check_entry(entry, archive=archive, limit=limits.member, twice=name.name in members)
            check_space(scratch, entry.size, purpose=f"reading {str(archive)!r}")
            start = spool.tell()
            stream.copy(entry.size, spool)
            members[name.name] = Member(name.name, entry.size, spool, start)
        stream.skip_rest()
    spool.flush()
    say(
        f"{archive.name}: {len(members):,} files, {byte_size(spool.tell())} of text, kept in {str(scratch)!r} meanwhile"
    )
    return members


def find_zip_member(archive: zipfile.ZipFile, name: str, *, path: Path, limits: Limits) -> zipfile.ZipInfo:
    """The one member of that name, of a size that it may have."""
    found = [info for info in archive.infolist() if info.filename == name]
    if len(found) != 1 or found[0].flag_bits & 1:
        reason = "is encrypted" if len(found) == 1 else f"stands there {len(found)} times"
        raise UserError(f"{str(path)!r} must hold one plain member {name}; it {reason}. Fetch the archive anew")
    if found[0].file_size > limits.member:
        raise _too_large(path, f"{name} has {byte_size(found[0].file_size)}", limits.member)
    return found[0]


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


class _Stretch(io.RawIOBase):
    """Some bytes of a file, read without moving the file's own position."""

    def __init__(self, file: BinaryIO, start: int, stop: int, *, owned: bool) -> None:
        self.file, self.start, self.stop, self.owned = file, start, stop, owned
        self.position = start

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

    def close(self) -> None:
        if self.owned:
            self.file.close()
        super().close()


class _Unpacked:
    """The bytes of a tar as they come out of its compression: what `tarfile` asks of a file, and bounded."""

    def __init__(self, path: Path, stream: BinaryIO, *, limit: int, compressed: BinaryIO, progress: Progress) -> None:
        self.path, self.stream, self.limit = path, stream, limit
        self.compressed, self.progress = compressed, progress
        self.position = 0
        self.latest = b""
        """What was read last."""

    def tell(self) -> int:
        return self.position

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _LONGEST_READ:
            raise tarfile.ReadError(f"a header of {size} bytes")
        data = self.latest = self.stream.read(size)
        self.position += len(data)
        if self.position > self.limit:
            raise _too_large(self.path, f"it holds more than {byte_size(self.limit)}", self.limit)
        self.progress.advance(self.compressed.tell() - self.progress.count)
        return data

    def seek(self, position: int) -> None:
        if position < self.position:
            raise tarfile.ReadError("a member of less than no bytes")
        while self.position < position:
            if not self.read(min(1 << 20, position - self.position)):
                return  # tarfile asks for one more byte and finds none

    def copy(self, size: int, target: BinaryIO) -> None:
        end = self.position + size
        while self.position < end:
            data = self.read(min(1 << 20, end - self.position))
            if not data:
                raise tarfile.ReadError("unexpected end of data")
            target.write(data)

    def skip_rest(self) -> None:
        """The tar may end before the compressed file does, and the checksum stands at the very end."""
        while self.read(1 << 20):
            pass


@contextmanager
def _unpacked(archive: Path, *, limit: int) -> Iterator[_Unpacked]:
    label = f"reading {archive.name}"
    with archive.open("rb") as file, Progress(archive.stat().st_size, label=label, unit="B") as progress:
        beginning = file.read(6)
        file.seek(0)
        unpack = next((unpack for magic, unpack in _COMPRESSIONS.items() if beginning.startswith(magic)), nullcontext)
        with unpack(file) as stream:
            yield _Unpacked(archive, stream, limit=limit, compressed=file, progress=progress)


def _entries(stream: _Unpacked) -> Iterator[tarfile.TarInfo]:
    """The tar's headers, one after the other; each is at the reader's disposal with its bytes next in the stream."""
    with tarfile.open(fileobj=stream, mode="r:") as tar:  # type: ignore[call-overload]
        while (entry := tar.next()) is not None:
            yield entry
            # tarfile remembers every member; Europarl has 190,000 of them.
            tar.members.clear()
    # tarfile takes anything that is no header for the end, but the end is marked by zeros.
    if stream.latest.strip(b"\0") or not stream.latest:
        raise tarfile.ReadError("unexpected end of data")


def _is_plain(entry: tarfile.TarInfo) -> bool:
    return entry.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not entry.issparse()


def _check_entry(entry: tarfile.TarInfo, *, archive: Path, limit: int, twice: bool) -> None:
    name = PurePosixPath(entry.name).name
    if twice:
        raise UserError(f"{str(archive)!r} must hold each file once; it holds {name} twice. Fetch the archive anew")
    if entry.size > limit:
        raise _too_large(archive, f"{name} has {byte_size(entry.size)}", limit)


def _matches(name: PurePosixPath, pattern: str) -> bool:
    # `match` alone would look at the last parts only.
    return len(name.parts) == len(PurePosixPath(pattern).parts) and name.match(pattern)


def _too_large(path: Path, what: str, limit: int) -> UserError:
    return UserError(
        f"{str(path)!r} must be the published archive, in which nothing exceeds {byte_size(limit)}; {what}. Fetch it "
        "anew; text of your own is read with data=text"
    )
