"""sha256 of files; an index by path, size and modification time avoids hashing gigabytes twice."""

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from lm.data.download import file_sha256
from lm.system.errors import UserError
from lm.system.files import write_json


def file_hashes(paths: Sequence[Path], *, index: Path) -> list[str]:
    """The hash of each file, from the index if possible."""
    known: dict[str, object] = {}
    with contextlib.suppress(OSError, ValueError, TypeError):
        known = dict(json.loads(index.read_bytes()))
    hashes, num_known = [], len(known)
    for path in paths:
        try:
            stat = path.stat()
            key = json.dumps([str(path), stat.st_size, stat.st_mtime_ns])
            if not isinstance(digest := known.get(key), str):
                digest = file_sha256(path)
                # A file changed within the last two seconds may change again without a new modification time.
                if time.time_ns() - stat.st_mtime_ns > 2_000_000_000:
                    known[key] = digest
        except OSError as error:
            raise UserError(f"cannot read {str(path)!r}: {error.strerror}. Check its permissions") from None
        hashes.append(digest)
    if len(known) > num_known:
        with contextlib.suppress(OSError):  # the index only saves time: a read-only root works as well
            index.parent.mkdir(parents=True, exist_ok=True)
            write_json(index, known)
    return hashes
