"""Published archives, read in place: only members of the published layout, never extracted to a path."""

import gzip
import hashlib
import lzma
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from lm.config import ArchiveConfig
from lm.errors import UserError


@dataclass(frozen=True)
class Published:
    """A corpus as its publisher offers it."""

    file: str
    """The archive's file name."""
    site: str
    unpacked: str
    """The file or folder at the archive's top."""


_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError)

Members = dict[str, Callable[[], BinaryIO]]
"""File name to a function that opens the member."""


def find_archive(config: ArchiveConfig, *, published: Published) -> Path:
    """`data.archive`, or the published file, or what it unpacks to, in the corpus's own folder."""
    if config.archive is not None:
        archive = Path(config.archive)
        if not archive.exists():
            raise UserError(
                f"data.archive must name {published.file} or the folder it was unpacked to; got "
                f"{config.archive!r}, which does not exist. Fetch {published.file} from {published.site}"
            )
        return archive
    folder = Path(config.root) / config.name
    if (folder / published.file).exists():
        return folder / published.file
    if (folder / published.unpacked).exists():
        return folder
    raise UserError(
        f"data={config.name} needs {published.file}, and {str(folder / published.file)!r} does not exist. "
        f"Fetch it from {published.site} and put it there, or pass data.archive=PATH, the archive or the folder it "
        "was unpacked to"
    )


def archive_tag(config: ArchiveConfig, *, published: Published, patterns: Sequence[str]) -> str:
    """What sets a corpus made from `data.archive` apart from one of the published file; empty for that.

    By path, size and time of change, because hashing an archive takes longer than opening a prepared corpus.
    """
    if config.archive is None:
        return ""
    archive = find_archive(config, published=published)
    files = sorted(_folder_files(archive, patterns=patterns).values()) if archive.is_dir() else [archive]
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return "-" + hashlib.sha256(repr(stats).encode(errors="surrogateescape")).hexdigest()[:8]


def open_members(archive: Path, *, patterns: Sequence[str], scratch: Path) -> Members:
    """The archive's or folder's regular files that match one of the patterns, by file name.

    A tar can only be read from its beginning on, and its order is not the corpus's. So the wanted members are
    copied once to a file in `scratch` that has no name and vanishes with the process.
    """
    if archive.is_dir():
        files = _folder_files(archive, patterns=patterns)
        return {name: partial(_open_file, path) for name, path in files.items()}
    # Held open by the functions below, closed with the last of them.
    spool: BinaryIO = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115
    members: Members = {}
    with damage_told(archive), tarfile.open(archive, "r:*") as tar:
        while (member := tar.next()) is not None:
            name = PurePosixPath(member.name)
            if member.isreg() and any(_matches(name, pattern) for pattern in patterns):
                content = tar.extractfile(member)
                assert content is not None
                start = spool.tell()
                shutil.copyfileobj(content, spool)
                members[name.name] = partial(_read_spool, spool, start, spool.tell() - start)
            # tarfile remembers every member; Europarl has 190,000 of them.
            tar.members.clear()  # type: ignore[attr-defined]
        # The tar may end before the compressed file does, and the checksum stands at the very end.
        assert tar.fileobj is not None
        while tar.fileobj.read(1 << 20):
            pass
    return members


@contextmanager
def damage_told(archive: Path) -> Iterator[None]:
    """Turn what the libraries raise on a damaged archive into one clear paragraph."""
    try:
        yield
    except _DAMAGE as error:
        raise UserError(
            f"{str(archive)!r} must be a whole archive of the published form; reading it failed ({error!r}). "
            "Fetch it anew"
        ) from None


def _folder_files(folder: Path, *, patterns: Sequence[str]) -> dict[str, Path]:
    return {path.name: path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}


def _open_file(path: Path) -> BinaryIO:
    return path.open("rb")


def _matches(name: PurePosixPath, pattern: str) -> bool:
    # `match` alone would look at the last parts only.
    return len(name.parts) == len(PurePosixPath(pattern).parts) and name.match(pattern)


def _read_spool(spool: BinaryIO, start: int, length: int) -> BinaryIO:
    spool.seek(start)
    return BytesIO(spool.read(length))
