"""Fetch a file over HTTP: resumed where it broke off, verified, under its final name only when it is whole.

Bytes gather in `.NAME.part` beside the target. `.NAME.part.json` says which version of which file they are, by the
server's own mark (ETag or Last-Modified), so that a file that changed meanwhile is begun anew. A process that is
killed at any moment leaves what the next one goes on from. Who downloads holds a lock on the part file.
"""

import contextlib
import fcntl
import http.client
import json
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from lm.data.fetch.file_hashes import file_sha256
from lm.system.console import Progress, byte_size, say
from lm.system.errors import UserError
from lm.system.files import sync_folder, write_json

_CHUNK = 1 << 18
_WORTH_ANOTHER_TRY = (408, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Patience:
    """When to give up."""

    timeout: float = 30.0
    """Seconds without a byte."""
    attempts: int = 6
    """Attempts in a row that bring nothing new."""
    pause: float = 1.0
    """Seconds before the second attempt, doubled before each further one."""


@dataclass(frozen=True)
class Expected:
    """What the whole file must be; None where nobody has published it."""

    size: int | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class _Version:
    """Which file the part file holds the beginning of."""

    url: str
    mark: str | None = None
    """The server's mark of this version, as If-Range takes it; None where it gave none, and nothing can be resumed."""
    size: int | None = None


class _AttemptError(Exception):
    """An attempt failed; `again` says whether another one may succeed."""

    def __init__(self, reason: object, *, again: bool = True) -> None:
        super().__init__(str(reason))
        self.again = again


def download(url: str, target: Path, *, expected: Expected, patience: Patience | None = None) -> None:
    """Fetch `url` to `target`; where another process does so first, its result stands."""
    part = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(part, target=target) as file:
            if file is None:
                return
            transfer = _Transfer(url, file, part=part, expected=expected, patience=patience or Patience())
            try:
                transfer.run(by_hand=_by_hand(target))
                os.fsync(file.fileno())
                part.rename(target)
                transfer.note.unlink(missing_ok=True)
                sync_folder(target.parent)
            finally:
                if transfer.have == 0:
                    transfer.remove()
    except OSError as error:
        raise UserError(
            f"cannot write {str(target)!r}: {error.strerror or error}. What was fetched so far is kept in "
            f"{part.name!r} beside it. Free the way and run again, or keep everything elsewhere with data.root=PATH"
        ) from None


def check_space(folder: Path, needed: int, *, purpose: str) -> None:
    """Refuse before anything is written where the disk cannot hold it."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{purpose} needs {byte_size(needed)} in {str(folder)!r}, where {byte_size(free)} are free. Free some "
            "space, or keep everything elsewhere with data.root=PATH"
        )


class _Transfer:
    """One file on its way into its part file."""

    def __init__(self, url: str, file: BinaryIO, *, part: Path, expected: Expected, patience: Patience) -> None:
        self.url, self.file, self.part = url, file, part
        self.expected, self.patience = expected, patience
        self.note = part.with_name(f"{part.name}.json")
        """Where the version is written down."""
        self.name = part.name.removeprefix(".").removesuffix(".part")
        self.have = file.seek(0, os.SEEK_END)
        self.connected = False
        """Whether the server ever answered: where it did not, there is probably no network to be patient with."""
        self.version = self._read_note()
        if self.version.mark is None:
            self._begin_anew()

    def run(self, *, by_hand: str) -> None:
        """Bring the whole file, or raise a UserError that says how to get it otherwise."""
        resumed = self.have > 0
        self._fetch(by_hand=by_hand)
        if self.expected.sha256 is None:
            return
        if (found := file_sha256(self.part, name=self.name)) != self.expected.sha256 and resumed:
            say("what was fetched earlier does not fit what was fetched now: beginning anew")
            self._begin_anew()
            self._fetch(by_hand=by_hand)
            found = file_sha256(self.part, name=self.name)
        if found != self.expected.sha256:
            self.have = 0
            raise UserError(
                f"{self.url} must be the file whose sha256 is {self.expected.sha256}; what came has {found}. It was "
                f"removed. Name another place with data.url=URL; if that very file is meant, say data.sha256={found}"
            )

    def _fetch(self, *, by_hand: str) -> None:
        """Attempts until every byte is there; what one attempt brought, the next need not."""
        failures, most = 0, self.have
        while self.version.size is None or self.have < self.version.size:
            try:
                self._attempt()
                return
            except _AttemptError as broken:
                failures = 1 if self.have > most else failures + 1
                most = max(most, self.have)
                if not broken.again or failures >= self.patience.attempts:
                    raise UserError(f"cannot fetch {self.url}: {broken}. {by_hand}") from None
                wait = self.patience.pause * 2 ** (failures - 1)
                say(f"{self.url}: {broken}; attempt {failures + 1} in {wait:g} s")
                time.sleep(wait)

    def _attempt(self) -> None:
        """Ask for what is missing and keep all that comes."""
        with self._request() as response:
            total = self._place(response)
            if total is not None:
                check_space(self.part.parent, total - self.have, purpose=f"fetching {self.url}")
            try:
                with Progress(total, start=self.have, label=f"fetching {self.name}", unit="B") as progress:
                    while chunk := self._receive(response):
                        self.file.write(chunk)
                        self.have += len(chunk)
                        progress.advance(len(chunk))
            finally:
                self.file.flush()
        if total is not None and self.have != total:
            raise _AttemptError(f"the connection ended after {self.have:,} of {total:,} bytes")

    def _request(self) -> http.client.HTTPResponse:
        headers = {"User-Agent": "adaptive-lm", "Accept-Encoding": "identity"}
        if self.have and self.version.mark:
            headers |= {"Range": f"bytes={self.have}-", "If-Range": self.version.mark}
        request = urllib.request.Request(self.url, headers=headers)
        try:
            response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=self.patience.timeout)
        except urllib.error.HTTPError as error:
            error.close()
            self.connected = True
            if error.code == 416:  # it has become shorter than what we have
                self._begin_anew()
                raise _AttemptError("the file has changed") from None
            raise _AttemptError(
                f"the server answers {error.code} {error.reason}", again=error.code in _WORTH_ANOTHER_TRY
            ) from None
        except urllib.error.URLError as error:
            raise _AttemptError(_words(error.reason), again=self.connected) from None
        except http.client.InvalidURL as error:
            raise _AttemptError(error, again=False) from None
        except (OSError, http.client.HTTPException) as error:
            raise _AttemptError(_words(error)) from None
        self.connected = True
        return response

    def _place(self, response: http.client.HTTPResponse) -> int | None:
        """Make the part file end where the body begins; returns the whole file's size, where it is told."""
        mark = _mark(response)
        if response.status == 206:
            span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
            same = span and int(span[1]) == self.have and span[2] in ("*", str(self.version.size))
            if not same or mark not in (None, self.version.mark):
                self._begin_anew()
                raise _AttemptError("the file has changed")
            return self.version.size
        size = response.headers.get("Content-Length")
        version = _Version(self.url, mark, int(size) if size and size.isdecimal() else None)
        if self.expected.size is not None and version.size not in (None, self.expected.size):
            raise _AttemptError(f"it offers {version.size:,} bytes in place of {self.expected.size:,}", again=False)
        self._begin_anew(version)
        return version.size

    def _receive(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read1(_CHUNK)
        except (OSError, http.client.HTTPException) as error:
            raise _AttemptError(_words(error)) from None

    def _begin_anew(self, version: _Version | None = None) -> None:
        # In this order: at no moment are there bytes that the note calls another version's.
        self.file.seek(0)
        self.file.truncate()
        self.have = 0
        self.version = version or _Version(self.url)
        write_json(self.note, asdict(self.version))

    def _read_note(self) -> _Version:
        try:
            version = _Version(**json.loads(self.note.read_bytes()))
        except (OSError, ValueError, TypeError):
            return _Version(self.url)
        return version if version.url == self.url else _Version(self.url)

    def remove(self) -> None:
        """Leave nothing behind, not even a folder that was made for it."""
        self.part.unlink(missing_ok=True)
        self.note.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it holds something else
            self.part.parent.rmdir()


@contextlib.contextmanager
def _locked(part: Path, *, target: Path) -> Iterator[BinaryIO | None]:
    """The part file, ours alone; None where the target is there, maybe because we waited for who fetched it."""
    while not target.exists():
        with open(os.open(part, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:  # noqa: PTH123
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting for the process that fetches {str(target)!r}")
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(part, file):  # its last owner may have renamed or removed it since we opened it
                yield file
                return
    yield None


def _is_at(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _mark(response: http.client.HTTPResponse) -> str | None:
    """What If-Range takes: a strong ETag, or else the time of change."""
    tag: str | None = response.headers.get("ETag")
    return tag if tag and not tag.startswith("W/") else response.headers.get("Last-Modified")


def _words(error: object) -> str:
    if isinstance(error, TimeoutError):
        return "the server stopped answering"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def _by_hand(target: Path) -> str:
    return (
        f"Fetch that file by other means and put it at {str(target)!r}, or pass data.archive=PATH, the archive or the "
        "folder it was unpacked to; a mirror is named with data.url=URL"
    )
