"""Where a published corpus is: in its own folder, at `data.archive`, or fetched; and whether it is the right one."""

import contextlib
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm.config.data import ArchiveConfig
from lm.data.fetch.archive import BEGINNINGS, Limits, folder_files
from lm.data.fetch.download import Expected, check_space, download
from lm.data.fetch.file_hashes import file_sha256
from lm.system.console import byte_size, say
from lm.system.errors import UserError
from lm.system.files import write_text


@dataclass(frozen=True)
class Published:
    """A corpus as its publisher offers it."""

    file: str
    """The archive's file name."""
    url: str
    unpacked: str
    """The file or folder at the archive's top."""
    limits: Limits
    """What no such archive exceeds."""
    room: int
    """About how many bytes preparing it takes besides the archive itself."""
    size: int | None = None
    sha256: str | None = None
    """None where none is published: then the first one used is written down beside the archive, and held to."""


@dataclass(frozen=True)
class Archive:
    """A corpus's archive, or the folder it was unpacked to, found and verified."""

    path: Path
    facts: dict[str, Any]
    """What meta.json says of it: path, address, size, sha256."""


def find_archive(config: ArchiveConfig, *, published: Published) -> Archive:
    """`data.archive`, or the published file or what it unpacks to in the corpus's own folder; else it is fetched."""
    if config.archive is not None:
        return _given(config, Path(config.archive), published=published)
    folder = Path(config.root) / config.name
    path, url = folder / published.file, config.url or published.url
    if path.exists():
        digest = _verify(path, config=config, published=published)
    elif (folder / published.unpacked).exists():
        return Archive(folder, {"path": str(folder)})
    else:
        check_space(Path(config.root), (published.size or 0) + published.room, purpose=f"data={config.name}")
        say(f"fetching {url} to {str(path)!r}")
        expected = _expected_sha256(path, config=config, published=published)
        size = published.size if expected == published.sha256 else None
        download(url, path, expected=Expected(size, expected))
        digest = expected or _verify_fetched(path, config=config, published=published)
    facts = {"path": str(path), "url": url, "size": path.stat().st_size, "sha256": digest}
    if config.url is None and published.sha256 not in (None, digest):
        del facts["url"]  # somebody put another file there
    return Archive(path, facts)


def archive_tag(config: ArchiveConfig, *, published: Published, patterns: Sequence[str]) -> str:
    """What sets a corpus made from another archive apart from one of the published file; empty for that.

    `data.archive` counts by path, size and time of change, because hashing it takes longer than opening a prepared
    corpus.
    """
    if config.archive is None:
        return "" if config.sha256 in (None, published.sha256) else f"-{config.sha256[:8]}"
    archive = _existing(config.archive, published=published)
    files = sorted(folder_files(archive, patterns=patterns).values()) if archive.is_dir() else [archive]
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return "-" + hashlib.sha256(repr(stats).encode(errors="surrogateescape")).hexdigest()[:8]


def _existing(name: str, *, published: Published) -> Path:
    archive = Path(name)
    if not archive.exists():
        raise UserError(
            f"data.archive must name {published.file} or the folder it was unpacked to; got {name!r}, which does not "
            f"exist. Fetch it from {published.url}, or leave data.archive out and it is fetched for you"
        )
    return archive


def _given(config: ArchiveConfig, path: Path, *, published: Published) -> Archive:
    """The user's own archive: any will do, unless `data.sha256` says which."""
    path = _existing(str(path), published=published)
    if path.is_dir():
        if config.sha256 is not None:
            raise UserError(
                f"data.sha256 is that of a file, but data.archive={str(path)!r} is a folder. Leave data.sha256 out"
            )
        return Archive(path, {"path": str(path)})
    digest = file_sha256(path)
    if config.sha256 is not None and digest != config.sha256:
        raise UserError(
            f"data.archive={str(path)!r} must have the sha256 {config.sha256}; it has {digest}. If that very file is "
            "meant, leave data.sha256 out"
        )
    if config.sha256 is None and published.sha256 not in (None, digest):
        say(f"note: {str(path)!r} is not the published {published.file}, and is taken as it is (sha256 {digest})")
    return Archive(path, {"path": str(path), "size": path.stat().st_size, "sha256": digest})


def _expected_sha256(path: Path, *, config: ArchiveConfig, published: Published) -> str | None:
    """What `data.sha256` says, or the publisher, or what was written down at first use."""
    if known := config.sha256 or published.sha256:
        return known
    try:
        noted = _note(path).read_text("ascii", errors="replace").split()[:1]
    except FileNotFoundError:
        return None
    if noted and re.fullmatch("[0-9a-f]{64}", noted[0]):
        return noted[0]
    raise UserError(f"{str(_note(path))!r} must begin with a sha256; it does not. Remove it and run again")


def _verify(path: Path, *, config: ArchiveConfig, published: Published) -> str:
    """The sha256 of the archive in the corpus's own folder, which must be the expected one."""
    expected = _expected_sha256(path, config=config, published=published)
    size = path.stat().st_size
    if config.sha256 is None and published.size not in (None, size):
        raise UserError(
            f"{str(path)!r} must be the published {published.file} of {published.size:,} bytes; it has {size:,}. "
            "Remove it and run again: it is fetched anew. To use that very file, pass it as data.archive=PATH"
        )
    found = file_sha256(path)
    if expected is None:
        _check_kind(path)
        with contextlib.suppress(FileNotFoundError):  # another process has just put the same there
            write_text(_note(path), f"{found}  {path.name}\n")
    elif found != expected:
        noted = config.sha256 is None and published.sha256 is None
        meant = f"remove {str(_note(path))!r}" if noted else f"say data.sha256={found}"
        raise UserError(
            f"{str(path)!r} must have the sha256 {expected}{' that it had at first' if noted else ''}; it has {found}. "
            f"Remove it and run again: it is fetched anew. If that very file is meant, {meant}"
        )
    return found


def _verify_fetched(path: Path, *, config: ArchiveConfig, published: Published) -> str:
    try:
        return _verify(path, config=config, published=published)
    except UserError:
        path.unlink()
        raise


def _check_kind(path: Path) -> None:
    """Refuse the page that a server sent in an archive's place, before its checksum is written down."""
    with path.open("rb") as file:
        beginning = file.read(6)
    if not beginning.startswith(BEGINNINGS):
        raise UserError(
            f"{str(path)!r} must be an archive; what came has {byte_size(path.stat().st_size)} and begins with "
            f"{beginning!r}, as none does. Fetch it anew, or from another place with data.url=URL"
        )


def _note(path: Path) -> Path:
    """Where the checksum of a file is written down, in the form that `sha256sum -c` reads."""
    return path.with_name(f"{path.name}.sha256")
