"""Find the archive of a published corpus (`data.archive`, its own folder, or a download) and verify it."""

import contextlib
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm.data.fetch.archive import BEGINNINGS, Limits, folder_files, open_members
from lm.data.fetch.download import check_space, download
from lm.data.fetch.file_hashes import file_sha256
from lm.data.settings import ArchiveConfig
from lm.data.text.reading import Part
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
    patterns: tuple[str, ...]
    """Which of its members are read."""
    limits: Limits
    room: int
    """About how many bytes preparing it takes, without the archive itself."""
    size: int | None = None
    sha256: str | None = None
    """None if not published: then the first one seen is written beside the archive, and required from then on."""

    def open(self, archive: Path, *, scratch: Path) -> dict[str, Part]:
        """The files of the archive, or of the folder it was unpacked to, that are read."""
        return open_members(archive, patterns=self.patterns, limits=self.limits, scratch=scratch)


Archive = tuple[Path, dict[str, Any]]
"""A verified archive, or the folder it was unpacked to, and its record in meta.json: path, address, size, sha256."""


def find_archive(config: ArchiveConfig, *, published: Published) -> Archive:
    """`data.archive`, or what the corpus's own folder holds: the archive or its content; else a download."""
    if config.archive is not None:
        return _given_archive(config, published=published)
    folder = Path(config.root) / config.name
    path, url = folder / published.file, config.url or published.url
    if path.exists():
        digest = _verify(path, config=config, published=published)
    elif (folder / published.unpacked).exists():
        return folder, {"path": str(folder)}
    else:
        check_space(Path(config.root), (published.size or 0) + published.room, purpose=f"data={config.name}")
        say(f"downloading {url} to {str(path)!r}")
        expected = _expected_sha256(path, config=config, published=published)
        size = published.size if expected == published.sha256 else None
        download(url, path, size=size, sha256=expected)
        try:
            digest = expected or _verify(path, config=config, published=published)
        except UserError:
            path.unlink()
            raise
    facts = {"path": str(path), "url": url, "size": path.stat().st_size, "sha256": digest}
    if config.url is None and published.sha256 not in (None, digest):
        del facts["url"]  # somebody put another file there
    return path, facts


def archive_tag(config: ArchiveConfig, *, published: Published) -> str:
    """Folder suffix of a corpus made from another archive than the published one; empty for that one.

    `data.archive` is identified by path, size and modification time: hashing it would take longer than opening a
    prepared corpus.
    """
    if config.archive is None:
        return "" if config.sha256 in (None, published.sha256) else f"-{config.sha256[:8]}"
    archive = _existing(config.archive, published=published)
    files = sorted(folder_files(archive, patterns=published.patterns).values()) if archive.is_dir() else [archive]
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return "-" + hashlib.sha256(repr(stats).encode(errors="surrogateescape")).hexdigest()[:8]


def _existing(name: str, *, published: Published) -> Path:
    if not Path(name).exists():
        raise UserError(
            f"data.archive must name {published.file} or the folder it was unpacked to; got {name!r}, which does not "
            f"exist. Download it from {published.url}, or leave data.archive out to have it downloaded"
        )
    return Path(name)


def _given_archive(config: ArchiveConfig, *, published: Published) -> Archive:
    """The user's own archive: any is accepted, unless `data.sha256` is set."""
    assert config.archive is not None
    path = _existing(config.archive, published=published)
    if path.is_dir():
        if config.sha256 is not None:
            raise UserError(
                f"data.sha256 is that of a file, but data.archive={str(path)!r} is a folder. Leave data.sha256 out"
            )
        return path, {"path": str(path)}
    digest = file_sha256(path)
    if config.sha256 not in (None, digest):
        raise UserError(
            f"data.archive={str(path)!r} must have the sha256 {config.sha256}; it has {digest}. To use this file "
            "anyway, leave data.sha256 out"
        )
    if config.sha256 is None and published.sha256 not in (None, digest):
        say(f"note: {str(path)!r} is not the published {published.file}; it is used as it is (sha256 {digest})")
    return path, {"path": str(path), "size": path.stat().st_size, "sha256": digest}


def _expected_sha256(path: Path, *, config: ArchiveConfig, published: Published) -> str | None:
    """From `data.sha256`, from the publisher, or from the note of the first use."""
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
    """Check the archive in the corpus's own folder, and note its sha256 at first use; returns the sha256."""
    expected = _expected_sha256(path, config=config, published=published)
    size = path.stat().st_size
    if config.sha256 is None and published.size not in (None, size):
        raise UserError(
            f"{str(path)!r} must be the published {published.file} of {published.size:,} bytes; it has {size:,}. "
            "Remove it and run again to download it; to use this file anyway, pass it as data.archive=PATH"
        )
    found = file_sha256(path)
    if expected is None:
        _reject_page(path)
        with contextlib.suppress(FileNotFoundError):  # another process has just written the same note
            write_text(_note(path), f"{found}  {path.name}\n")
    elif found != expected:
        noted = config.sha256 is None and published.sha256 is None
        accept = f"remove {str(_note(path))!r}" if noted else f"pass data.sha256={found}"
        raise UserError(
            f"{str(path)!r} must have the sha256 {expected}{' that it had at first' if noted else ''}; it has {found}. "
            f"Remove it and run again to download it; to use this file anyway, {accept}"
        )
    return found


def _reject_page(path: Path) -> None:
    """Reject a web page that a server sent instead of the archive, before its checksum is noted."""
    with path.open("rb") as file:
        beginning = file.read(6)
    if not beginning.startswith(BEGINNINGS):
        raise UserError(
            f"{str(path)!r} must be an archive; this file has {byte_size(path.stat().st_size)} and begins with "
            f"{beginning!r}, as no archive does. Download it again, or from elsewhere with data.url=URL"
        )


def _note(path: Path) -> Path:
    """The file that records the checksum, in the format of `sha256sum -c`."""
    return path.with_name(f"{path.name}.sha256")
