"""sha256 of files; those of text are remembered by path, size and time of change, so that gigabytes are hashed once."""

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from lm.system.console import Progress
from lm.system.errors import UserError
from lm.system.files import write_json


def file_sha256(path: Path, *, name: str | None = None) -> str:
    """sha256 of a whole file; progress calls it by another name, if one is given."""
    digest = hashlib.sha256()
    label = f"sha256 of {name or path.name}"
    with path.open("rb") as file, Progress(path.stat().st_size, label=label, unit="B") as progress:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
            progress.advance(len(chunk))
    return digest.hexdigest()


def file_hashes(paths: Sequence[Path], *, index: Path) -> list[str]:
    """The hash of each file; `index` is the file that remembers them."""
    known = _remembered(index)
    hashes, new = [], {}
    for path in paths:
        try:
            stat = path.stat()
            key = json.dumps([str(path), stat.st_size, stat.st_mtime_ns])
            if not isinstance(digest := known.get(key), str):
                digest = file_sha256(path)
                # A file changed this very moment may change again without its time showing it.
                if time.time_ns() - stat.st_mtime_ns > 2_000_000_000:
                    new[key] = digest
        except OSError as error:
            raise UserError(f"cannot read {str(path)!r}: {error.strerror}. Check its permissions") from None
        hashes.append(digest)
    if new:
        _remember(index, {**known, **new})
    return hashes


def _remembered(index: Path) -> dict[str, object]:
    try:
        known = json.loads(index.read_bytes())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _remember(index: Path, known: dict[str, object]) -> None:
    try:
        index.parent.mkdir(parents=True, exist_ok=True)
        write_json(index, known)
    except OSError:
        pass  # It only saves time: a read-only root still serves what it holds.
