"""Download a file over HTTP: resumed where it stopped, verified, and under its final name only when complete.

Bytes are collected in `.NAME.part` beside the target, under a lock. `.NAME.part.json` records their version (ETag or
Last-Modified), so that a file that has changed on the server is not mixed with the old one. A process that is killed at
any moment leaves a state from which the next one resumes.
"""

import contextlib
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
from lm.data.locking import locked
from lm.system.console import Progress, byte_size, say
from lm.system.errors import UserError
from lm.system.files import sync_folder, write_json

_TEMPORARY = (408, 425, 429, 500, 502, 503, 504)
"""Status codes after which another attempt may succeed."""


@dataclass(frozen=True)
class Patience:
    """When to give up."""

    timeout: float = 30.0
    """Seconds without a byte."""
    attempts: int = 6
    """Consecutive attempts without progress."""
    pause: float = 1.0
    """Seconds before the second attempt, doubled before each further one."""


@dataclass(frozen=True)
class _Version:
    """The file whose beginning the part file holds."""

    url: str
    mark: str | None = None
    """Strong ETag or Last-Modified, for If-Range; without one the download cannot be resumed."""
    size: int | None = None


class _AttemptError(Exception):
    """An attempt failed; `again` says whether another one may succeed."""

    def __init__(self, reason: object, *, again: bool = True) -> None:
        super().__init__(str(reason))
        self.again = again


def download(
    url: str, target: Path, *, size: int | None = None, sha256: str | None = None, patience: Patience | None = None
) -> None:
    """Download `url` to `target`, unless another process does so first; checks size and sha256 if they are given."""
    part = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(part, target=target) as file:
            transfer = _Transfer(url, file, target=target, patience=patience or Patience())
            try:
                if not target.exists():
                    transfer.run(size=size, sha256=sha256)
                    os.fsync(file.fileno())
                    part.rename(target)
                    sync_folder(target.parent)
            finally:
                if transfer.size == 0 or target.exists():
                    transfer.remove()
    except OSError as error:
        raise UserError(
            f"cannot write {str(target)!r}: {error.strerror or error}. What was downloaded so far is kept in "
            f"{part.name!r} beside it. Fix this and run again, or keep everything elsewhere with data.root=PATH"
        ) from None


@contextlib.contextmanager
def _locked(part: Path, *, target: Path) -> Iterator[BinaryIO]:
    def opener() -> int:
        return os.open(part, os.O_RDWR | os.O_CREAT, 0o666)

    def on_wait() -> None:
        say(f"waiting for the process that downloads {str(target)!r}")

    with locked(part, opener=opener, on_wait=on_wait) as lock, open(lock, "r+b", closefd=False) as file:
        yield file


def check_space(folder: Path, needed: int, *, purpose: str) -> None:
    """Refuse before anything is written if the disk is too small."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{purpose} needs {byte_size(needed)} in {str(folder)!r}, where {byte_size(free)} are free. Free some "
            "space, or keep everything elsewhere with data.root=PATH"
        )


class _Transfer:
    """The download of one file into its part file."""

    def __init__(self, url: str, file: BinaryIO, *, target: Path, patience: Patience) -> None:
        self.url, self.file, self.target, self.patience = url, file, target, patience
        self.part, self.note = (target.with_name(f".{target.name}.part{ending}") for ending in ("", ".json"))
        self.size = file.seek(0, os.SEEK_END)
        self.connected = False
        """Whether the server ever answered; if not, there is probably no network, and no point in retrying."""
        self.version = _Version(url)
        with contextlib.suppress(OSError, ValueError, TypeError):
            self.version = _Version(**json.loads(self.note.read_bytes()))
        if self.version.url != url or self.version.mark is None:
            self._restart()

    def run(self, *, size: int | None, sha256: str | None) -> None:
        """Download and verify the whole file, or raise a UserError that says how else to get it."""
        resumed = self.size > 0
        self._fetch(size)
        if sha256 is None or (found := file_sha256(self.part, name=self.target.name)) == sha256:
            return
        self._restart()
        if resumed:
            say("the parts of the download do not fit together: starting over")
            self.run(size=size, sha256=sha256)
            return
        raise UserError(
            f"{self.url} must be the file with the sha256 {sha256}; this one has {found} and was removed. Use another "
            f"server with data.url=URL; to accept this file, pass data.sha256={found}"
        )

    def _fetch(self, expected_size: int | None) -> None:
        """Retry until every byte is there; each attempt continues the one before."""
        failures, most = 0, self.size
        while self.version.size is None or self.size < self.version.size:
            try:
                self._attempt(expected_size)
                return
            except _AttemptError as error:
                failures = 1 if self.size > most else failures + 1
                most = max(most, self.size)
                if not error.again or failures >= self.patience.attempts:
                    raise UserError(
                        f"cannot download {self.url}: {error}. Get the file by other means and put it at "
                        f"{str(self.target)!r}, or pass data.archive=PATH, the archive or the folder it was unpacked "
                        "to; for a mirror, pass data.url=URL"
                    ) from None
                wait = self.patience.pause * 2 ** (failures - 1)
                say(f"{self.url}: {error}; attempt {failures + 1} in {wait:g} s")
                time.sleep(wait)

    def _attempt(self, expected_size: int | None) -> None:
        """Request what is missing and keep all that arrives."""
        with self._network_errors():
            response = self._request()
        with response:
            total = self._position(response, expected_size)
            if total is not None:
                check_space(self.part.parent, total - self.size, purpose=f"downloading {self.url}")
            label = f"downloading {self.target.name}"
            try:
                with Progress(total, start=self.size, label=label, unit="B") as progress:
                    while chunk := self._receive(response):
                        self.file.write(chunk)
                        self.size += len(chunk)
                        progress.advance(len(chunk))
            finally:
                self.file.flush()
        if total is not None and self.size != total:
            raise _AttemptError(f"the connection ended after {self.size:,} of {total:,} bytes")

    def _request(self) -> http.client.HTTPResponse:
        headers = {"User-Agent": "adaptive-lm", "Accept-Encoding": "identity"}
        if self.size and self.version.mark:
            headers |= {"Range": f"bytes={self.size}-", "If-Range": self.version.mark}
        request = urllib.request.Request(self.url, headers=headers)
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=self.patience.timeout)
        self.connected = True
        return response

    def _receive(self, response: http.client.HTTPResponse) -> bytes:
        with self._network_errors():
            return response.read1(1 << 18)

    @contextlib.contextmanager
    def _network_errors(self) -> Iterator[None]:
        """Turn what the network raises into an _AttemptError; errors of the disk are not raised inside."""
        try:
            yield
        except urllib.error.HTTPError as error:
            error.close()
            self.connected = True
            if error.code == 416:  # the file is shorter than what we have
                self._restart()
                raise _AttemptError("the file has changed") from None
            answer = f"the server answers {error.code} {error.reason}"
            raise _AttemptError(answer, again=error.code in _TEMPORARY) from None
        except (OSError, http.client.HTTPException) as error:
            unreachable = isinstance(error, urllib.error.URLError) and not self.connected
            again = not (unreachable or isinstance(error, http.client.InvalidURL))
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                reason = "the server stopped answering"
            text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
            raise _AttemptError(text, again=again) from None

    def _position(self, response: http.client.HTTPResponse, expected_size: int | None) -> int | None:
        """Make the part file end where the response begins; returns the size of the whole file, if known."""
        tag = response.headers.get("ETag")
        mark = tag if tag and not tag.startswith("W/") else response.headers.get("Last-Modified")
        if response.status == 206:
            span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
            same = span and int(span[1]) == self.size and span[2] in ("*", str(self.version.size))
            if not same or mark not in (None, self.version.mark):
                self._restart()
                raise _AttemptError("the file has changed")
            return self.version.size
        length = response.headers.get("Content-Length", "")
        size = int(length) if length.isdecimal() else None
        if None not in (size, expected_size) and size != expected_size:
            raise _AttemptError(f"it offers {size:,} bytes instead of {expected_size:,}", again=False)
        self._restart(_Version(self.url, mark, size))
        return size

    def _restart(self, version: _Version | None = None) -> None:
        # In this order: the note never describes bytes of another version.
        self.file.seek(0)
        self.file.truncate()
        self.size = 0
        self.version = version or _Version(self.url)
        write_json(self.note, asdict(self.version))

    def remove(self) -> None:
        """Leave nothing behind, not even a folder that was created for the download."""
        self.part.unlink(missing_ok=True)
        self.note.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it holds something else
            self.part.parent.rmdir()
