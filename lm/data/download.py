"""Download files over HTTP: resumable, verified, and moved into place only when complete.

Data is collected in `.NAME.part` next to the target; if this process is killed, the next one resumes from there.
"""

import hashlib
import http.client
import os
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import BinaryIO, TextIO

from lm.system.console import Progress, say
from lm.system.errors import UserError
from lm.system.files import exclusive, sync_folder

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
    """Compute a file's SHA-256, or the hash that the checksum `like` is, with a progress bar."""
    name = algorithm(like)
    digest, label = hashlib.new(name), label or f"{name} of {path.name}"
    with path.open("rb") as file, Progress(path.stat().st_size, label=label, unit="B", to=to) as progress:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
            progress.advance(len(chunk))
    return digest.hexdigest()
