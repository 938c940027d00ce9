"""Find or download published archives, verify them, and open their text files."""

import hashlib
import http.client
import os
import ssl
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TextIO

from lm.data.formats import open_compressed, parquet_texts
from lm.data.source import ArchiveConfig, Source, Splits, TextFile, explain_damage, files_tag, text_source
from lm.system.console import Progress, say
from lm.system.errors import UserError
from lm.system.files import exclusive, put_in_place, sync_folder, write_beside

Files = dict[str, TextFile]
"""Text files of an archive by file name."""
Mirror = str | Mapping[str, tuple[str, ...]]
"""Address of an archive; or, by the name of each of its files, the address of the file or of its .parquet parts."""


@dataclass(frozen=True)
class Archive:
    """A .zip or (compressed) .tar archive as published."""

    file: str
    """File name."""
    mirrors: tuple[Mirror, ...]
    """Addresses, tried in turn."""
    members: tuple[str, ...]
    """Patterns of the member paths to read."""
    size: int | None = None
    checksum: str | None = None
    """Published checksum: SHA-256 if available, else SHA-1 or MD5. meta.json records the actual SHA-256."""
    required: tuple[str, ...] = ()
    """File names that must be present. A folder that contains them is used like the archive."""
    checksums: Mapping[str, str] = field(default_factory=dict)
    """Published checksums of files by name, for folders and other archives of the same files."""

    def find(self, config: ArchiveConfig) -> tuple[Path, dict[str, Any]]:
        """Return the archive or its unpacked folder, and its entry for meta.json.

        It is `data.archive`, or what the corpus's folder contains, or a download.
        """
        path = self.path(config)
        if config.archive is None and not path.exists():
            files = self._folder_files(path.parent)
            path = path.parent if files and {*files}.issuperset(self.required) else self._download(config, path)
        if path.is_dir():
            if config.sha256 is not None:
                raise UserError(f"data.sha256 needs an archive; got the folder {str(path)!r}. Try data.sha256=null.")
            return path, {"path": str(path)}
        sha256, published = file_hash(path), self.checksum or ""
        expected = config.sha256 or (published if config.archive is None else "")
        if expected and (actual := sha256 if len(expected) == 64 else file_hash(path, like=expected)) != expected:
            again = "" if config.archive else " Remove it and run again to download it."
            raise UserError(
                f"{str(path)!r} must have the {algorithm(expected)} {expected}; got {actual}.{again} To use this file "
                f"anyway, pass data.sha256={sha256}."
            )
        if not expected and published and not self.checksums and file_hash(path, like=published) != published:
            say(f"note: {str(path)!r} is not the published {self.file} (sha256 {sha256})")
        address = {} if config.archive is not None else {"url": config.url or self.address}
        return path, {"path": str(path), **address, "size": path.stat().st_size, "sha256": sha256}

    def path(self, config: ArchiveConfig) -> Path:
        """`data.archive`, or where a download is stored."""
        return Path(config.archive or Path(config.root) / config.name / self.file)

    @property
    def address(self) -> str:
        """The first address, for messages and meta.json."""
        first = self.mirrors[0]
        return first if isinstance(first, str) else next(iter(first.values()))[0]

    def _download(self, config: ArchiveConfig, path: Path) -> Path:
        """Download the archive to `path`, or its files to that folder, from the first mirror that works."""
        checksum = config.sha256 or self.checksum
        known = [m for m in self.mirrors if isinstance(m, str) or (config.sha256 is None and _can_read(m))]
        mirrors = [config.url] if config.url else known  # data.sha256 is that of an archive, not of separate files
        for mirror in mirrors:
            try:
                if isinstance(mirror, str):
                    say(f"downloading {mirror} to {str(path)!r}")
                    download(mirror, path, size=self.size if checksum == self.checksum else None, checksum=checksum)
                    return path
                for name, addresses in mirror.items():
                    say(f"downloading {', '.join(addresses)} to {str(path.parent / name)!r}")
                    _download_file(addresses, path.parent / name, checksum=self.checksums.get(name))
                return path.parent
            except UserError as error:
                if mirror is mirrors[-1]:
                    raise
                say(f"note: {str(error).partition('. ')[0]}; trying another address")
        raise AssertionError

    def open(self, path: Path, *, scratch: Path, verify: bool = True) -> Files:
        """Return matching text files by name, extracted from the archive to `scratch` or found in its unpacked folder.

        A file named like a member counts as that member. `verify` compares published checksums.
        """
        folder = path
        if not path.is_dir() and not any(PurePosixPath(path.name).match(pattern) for pattern in self.members):
            _extract(path, self.members, scratch)
            folder = scratch
        files = self._folder_files(folder) if folder.is_dir() else {path.name: path}
        if missing := [name for name in self.required if name not in files]:
            listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise UserError(f"{str(path)!r} lacks {listed}. Download {self.file} again from {self.address}.")
        for name, checksum in (self.checksums if verify else {}).items():
            if (actual := file_hash(files[name], like=checksum)) != checksum:
                fix = "Try data=text" if path.is_dir() else f"To use it anyway, pass data.sha256={file_hash(path)}"
                raise UserError(
                    f"{name} of {str(path)!r} must have the {algorithm(checksum)} {checksum}; got {actual}. It is not "
                    f"the published text. {fix}."
                )
        return {name: TextFile.plain(file, name) for name, file in files.items()}

    def tag(self, config: ArchiveConfig) -> str:
        """Suffix of the prepared folder; empty for the published archive."""
        tag = "" if config.sha256 in (None, self.checksum) else f"-{config.sha256[:8]}"
        if config.archive is None:
            return tag
        path = Path(config.archive)
        if not path.exists():
            raise UserError(
                f"data.archive must name {self.file} or its unpacked folder; {config.archive!r} does not exist. "
                f"Download it from {self.address}, or try data.archive=null to have it downloaded."
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
        path = archive.path(config)
        is_new = not path.exists()
        try:
            found, facts = archive.find(config)
            record.update(facts)
            return assign(archive.open(found, scratch=scratch, verify=config.sha256 is None))
        except UserError:
            if is_new:
                path.unlink(missing_ok=True)  # a wrong download, which the next run must not use
            raise

    name, description = folder + archive.tag(config), f"{source} ({config.archive or archive.file!r})"
    return text_source(config, open_splits, folder=name, source=description, meta={"archive": record}, **more)


def _can_read(mirror: Mapping[str, tuple[str, ...]]) -> bool:
    return bool(find_spec("pyarrow")) or not any(parts[0].endswith(".parquet") for parts in mirror.values())


def _download_file(addresses: Sequence[str], target: Path, *, checksum: str | None) -> None:
    """Download a file, or make it from the rows of .parquet parts, in which empty rows are blank lines."""
    if not addresses[0].endswith(".parquet"):
        download(addresses[0], target, checksum=checksum)
        return
    parts = [target.with_name(f"{target.name}-{number}.parquet") for number, _ in enumerate(addresses)]
    for address, part in zip(addresses, parts, strict=True):
        download(address, part)
    texts = (text for part in parts for text in parquet_texts(TextFile.plain(part).open, str(part), "text"))
    with explain_damage(addresses[0]):
        written = write_beside(target, lambda file: file.writelines((text or " \n").encode() for text in texts))
    verify(written, checksum, name=addresses[0])
    put_in_place(written, target)
    for part in parts:
        part.unlink()


def _extract(path: Path, members: Sequence[str], scratch: Path) -> None:
    """Extract the regular files whose paths match one of the patterns, each up to its declared size."""

    def is_wanted(name: str) -> bool:
        # `match` alone compares only the last parts. Absolute paths and `..` never match.
        member = PurePosixPath(name)
        return any(len(member.parts) == pattern.count("/") + 1 and member.match(pattern) for pattern in members)

    with explain_damage(str(path)):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                archive.extractall(scratch, [name for name in archive.namelist() if is_wanted(name)])
            return
        # The standard library's readers ignore a damaged second stream of .xz and .bz2.
        with (
            open_compressed(path) as data,
            tarfile.open(fileobj=data, mode="r|", bufsize=1 << 18) as tar,
            Progress(None, label=f"reading {path.name}", unit="B") as progress,
        ):
            for member in tar:
                if member.isreg() and is_wanted(member.name):
                    tar.extract(member, scratch, set_attrs=False, filter="data")
                tar.members = []  # type: ignore[attr-defined]  # it keeps every member; Europarl has 190,000
                progress.advance(member.size)
            while data.read(1 << 20):
                pass  # the checksum is at the end of the compressed file


# ---- downloads -------------------------------------------------------------------------------------------------------
#
# Files are downloaded over HTTP to `.NAME.part`, which the next process resumes if this one is killed, verified, and
# moved into place only when complete.


RETRY_STATUS = (408, 416, 425, 429, 500, 502, 503, 504)
"""HTTP status codes after which another attempt may succeed."""
NETWORK_ERRORS = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError)
"""OSErrors of the network, as opposed to the disk."""
TIMEOUT_S = 30.0
"""Timeout in seconds without receiving data."""
ATTEMPTS = 6
"""Consecutive attempts without data before giving up."""
PAUSE_S = 1.0
"""Pause before the second attempt; doubles before each further one."""


def download(url: str, target: Path, *, size: int | None = None, checksum: str | None = None) -> None:
    """Download `url` to `target`; fails unless the file has the given size and checksum."""
    part = target.with_name(f".{target.name}.part")
    target.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(part.with_suffix(".lock"), waiting_for=f"the download of {str(target)!r}"):
        if target.exists():  # downloaded by another process in the meantime
            return
        with part.open("ab") as file:
            try:
                _fetch(url, file, target=target, size=size)
            except UserError:
                if file.tell() == 0:
                    part.unlink()
                raise
            os.fsync(file.fileno())
        verify(part, checksum, name=url)
        part.rename(target)
        sync_folder(target.parent)


def verify(path: Path, checksum: str | None, *, name: str) -> None:
    """Remove a downloaded file and raise UserError unless it has the checksum, if any; `name` is its address."""
    if checksum is not None and (actual := file_hash(path, like=checksum)) != checksum:
        path.unlink()
        anyway = f" To use this file anyway, pass data.sha256={actual}." if algorithm(actual) == "sha256" else ""
        raise UserError(
            f"{name} must have the {algorithm(checksum)} {checksum}; got {actual}. Run again in case the transfer "
            f"was damaged, or try data.url=URL for a mirror.{anyway}"
        )


def _fetch(url: str, file: BinaryIO, *, target: Path, size: int | None) -> None:
    """Append to `file` until it is complete; retries with pauses."""
    failures = 0
    while size is None or file.tell() != size:
        before = file.tell()
        try:
            _attempt(url, file, label=f"downloading {target.name}", size=size)
            return
        except (*NETWORK_ERRORS, ValueError) as error:  # ValueError: a redirect to an invalid URL
            status = error.code if isinstance(error, urllib.error.HTTPError) else None
            if status == 416:  # the file on the server is shorter than the part
                _empty(file)
            failures = 1 if file.tell() > before else failures + 1
            is_final = isinstance(error, urllib.error.URLError | ValueError)
            may_recover = status in RETRY_STATUS or file.tell() > 0 or not is_final
            reason = f"the server answers {error}" if status else str(getattr(error, "reason", error))
            if not may_recover or failures >= ATTEMPTS:
                raise UserError(
                    f"Cannot download {url}: {reason}. Get the file by other means and put it at {str(target)!r}, or "
                    "pass data.archive=PATH (the archive or the unpacked folder) or data.url=URL (a mirror)."
                ) from None
            pause = PAUSE_S * 2 ** (failures - 1)
            say(f"{url}: {reason}; attempt {failures + 1} in {pause:g} s")
            time.sleep(pause)


def _attempt(url: str, file: BinaryIO, *, label: str, size: int | None) -> None:
    """Request the missing bytes and append them; stops at `size` or at the size that the server announces."""
    headers = {"User-Agent": "adaptive-lm"} | ({"Range": f"bytes={file.tell()}-"} if file.tell() else {})
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S) as response:
        if not response.headers.get("Content-Range", "").startswith(f"bytes {file.tell()}-"):
            _empty(file)
        length = response.headers.get("Content-Length", "")
        total = file.tell() + int(length) if length.isdecimal() else size
        if size is not None and total != size:
            raise UserError(f"{url} must have {size:,} bytes; the server offers {total:,}. Try data.url=URL.")
        with Progress(total, start=file.tell(), label=label, unit="B") as progress:
            while chunk := response.read1(1 << 18):
                file.write(chunk)
                progress.advance(len(chunk))
                if total is not None and progress.count > total:
                    _empty(file)
                    raise UserError(f"{url} must have {total:,} bytes; the server sends more. Try data.url=URL.")
    if total is not None and file.tell() < total:
        raise ConnectionError(f"the connection ended after {file.tell():,} of {total:,} bytes")


def _empty(file: BinaryIO) -> None:
    file.seek(0)
    file.truncate()


def algorithm(checksum: str) -> str:
    """Return the name of the hash function that makes checksums of this length."""
    return {32: "md5", 40: "sha1"}.get(len(checksum), "sha256")


def file_hash(path: Path, *, like: str = "", label: str | None = None, to: TextIO | None = None) -> str:
    """Hash a file with the algorithm of checksum `like` (default: SHA-256), showing progress."""
    name = algorithm(like)
    digest, label = hashlib.new(name), label or f"{name} of {path.name}"
    with path.open("rb") as file, Progress(path.stat().st_size, label=label, unit="B", to=to) as progress:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
            progress.advance(len(chunk))
    return digest.hexdigest()
