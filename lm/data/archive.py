"""Find or download published archives, verify them, and open their text files."""

import tarfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from lm.data.download import download, file_sha256
from lm.data.settings import ArchiveConfig
from lm.data.source import Source, Splits, TextFile, explain_damage, files_tag, text_source
from lm.system.console import Progress, say
from lm.system.errors import UserError

Files = dict[str, TextFile]
"""Text files of an archive by file name."""


@dataclass(frozen=True)
class Archive:
    """A .zip or (compressed) .tar archive as published."""

    file: str
    """File name."""
    url: str
    members: tuple[str, ...]
    """Patterns of the member paths to read."""
    unpacked: str
    """Top-level file or folder of the archive. If it exists in the corpus's folder, no archive is needed."""
    size: int | None = None
    sha256: str | None = None
    """None if the publisher provides none; meta.json records the actual one."""
    required: tuple[str, ...] = ()
    """File names that must be present."""

    def find(self, config: ArchiveConfig) -> tuple[Path, dict[str, Any]]:
        """Find the verified archive or its unpacked folder; also return its entry for meta.json.

        It is `data.archive`, or what the corpus's folder contains, or a download.
        """
        path, url = Path(config.root) / config.name / self.file, config.url or self.url
        if config.archive is not None:
            path = Path(config.archive)
        elif not path.exists() and (path.parent / self.unpacked).exists():
            path = path.parent
        if path.is_dir():
            if config.archive is not None and config.sha256 is not None:
                raise UserError(f"data.sha256 needs an archive; got the folder {str(path)!r}. Try data.sha256=null.")
            return path, {"path": str(path)}
        expected = config.sha256 or (self.sha256 if config.archive is None else None)
        if not path.exists():
            say(f"downloading {url} to {str(path)!r}")
            download(url, path, size=self.size if expected == self.sha256 else None, sha256=expected)
        actual = file_sha256(path)
        if expected not in (None, actual):
            raise UserError(
                f"{str(path)!r} must have the sha256 {expected}; got {actual}. Remove it and run again to download it. "
                f"To use this file anyway, pass data.sha256={actual}."
            )
        if actual not in (config.sha256, self.sha256 or actual):
            say(f"note: {str(path)!r} is not the published {self.file} (sha256 {actual})")
        address = {} if config.archive is not None else {"url": url}
        return path, {"path": str(path), **address, "size": path.stat().st_size, "sha256": actual}

    def open(self, path: Path, *, scratch: Path) -> Files:
        """Return matching text files by name, extracted from the archive to `scratch` or found in its unpacked folder.

        A file named like a member counts as that member.
        """
        folder = path
        if not path.is_dir() and not any(PurePosixPath(path.name).match(pattern) for pattern in self.members):
            _extract(path, self.members, scratch)
            folder = scratch
        files = self._folder_files(folder) if folder.is_dir() else {path.name: path}
        if missing := [name for name in self.required if name not in files]:
            listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise UserError(f"{str(path)!r} lacks {listed}. Download {self.file} again from {self.url}.")
        return {name: TextFile.plain(file, name) for name, file in files.items()}

    def tag(self, config: ArchiveConfig) -> str:
        """Suffix of the prepared folder; empty for the published archive."""
        tag = "" if config.sha256 in (None, self.sha256) else f"-{config.sha256[:8]}"
        if config.archive is None:
            return tag
        path = Path(config.archive)
        if not path.exists():
            raise UserError(
                f"data.archive must name {self.file} or its unpacked folder; {config.archive!r} does not exist. "
                f"Download it from {self.url}, or try data.archive=null to have it downloaded."
            )
        return f"-{files_tag(sorted(self._folder_files(path).values()) if path.is_dir() else [path])}{tag}"

    def _folder_files(self, folder: Path) -> dict[str, Path]:
        return {path.name: path for pattern in self.members for path in folder.glob(pattern) if path.is_file()}


def archive_source(
    config: ArchiveConfig, archive: Archive, assign: Callable[[Files], Splits], *, folder: str, source: str, **more: Any
) -> Source:
    """Make the source of a published archive; `assign` maps files to splits, and `more` goes to `text_source`."""

    record: dict[str, Any] = {}  # complete when the archive is opened, before meta.json is written

    def open_splits(scratch: Path) -> Splits:
        path, facts = archive.find(config)
        record.update(facts)
        return assign(archive.open(path, scratch=scratch))

    name, description = folder + archive.tag(config), f"{source} ({config.archive or archive.file!r})"
    return text_source(config, open_splits, folder=name, source=description, meta={"archive": record}, **more)


def _extract(path: Path, members: Sequence[str], scratch: Path) -> None:
    """Extract the regular files whose paths match one of the patterns, each up to its declared size."""

    def is_wanted(name: str) -> bool:
        # `match` alone compares only the last parts. Absolute paths and `..` never match.
        member = PurePosixPath(name)
        return any(len(member.parts) == pattern.count("/") + 1 and member.match(pattern) for pattern in members)

    with explain_damage(str(path)), path.open("rb") as file:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                archive.extractall(scratch, [name for name in archive.namelist() if is_wanted(name)])
            return
        file.seek(0)
        label = f"reading {path.name}"
        with tarfile.open(fileobj=file) as tar, Progress(path.stat().st_size, label=label, unit="B") as progress:
            while (member := tar.next()) is not None:
                if member.isreg() and is_wanted(member.name):
                    tar.extract(member, scratch, set_attrs=False, filter="data")
                tar.members = []  # type: ignore[attr-defined]  # it keeps every member; Europarl has 190,000
                progress.advance(file.tell() - progress.count)
            while cast(IO[bytes], tar.fileobj).read(1 << 20):
                pass  # the checksum is at the end of the compressed file
