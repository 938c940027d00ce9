"""Atomic file writes and locks."""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from lm.system.console import say
from lm.system.tree import map_leaves


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a temporary file, sync, rename: readers see the old file or the new one, never a part.

    A symbolic link keeps naming the same file. Devices, pipes and our own stdout are written to directly.
    """
    if not path.exists() or (path.is_file() and not _is_stdout(path)):
        path = Path(os.path.realpath(path))
        put_in_place(write_beside(path, write), path)
        return
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "wb") if _is_stdout(path) else path.open("wb") as file:
        write(file)


def _is_stdout(path: Path) -> bool:
    """Whether a path is the file or pipe that file descriptor 1 writes to."""
    try:
        return os.path.samestat(os.fstat(1), path.stat())
    except OSError:
        return False


def write_beside(path: Path, write: Callable[[BinaryIO], object]) -> Path:
    """Write a complete, synced file next to `path`, for `put_in_place`; it is removed if writing fails."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # left by a crash; may be a hard link to a good file
    try:
        with partial.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return partial


def put_in_place(partial: Path, path: Path) -> None:
    partial.replace(path)
    sync_folder(path.parent)


def write_bytes(path: Path, data: bytes) -> None:
    write_whole(path, lambda file: file.write(data))


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(json_ready(value), indent=2) + "\n")


def json_ready(value: Any) -> Any:
    """Replace infinities and NaN by null, because JSON has neither."""
    return map_leaves(lambda leaf: None if isinstance(leaf, float) and not math.isfinite(leaf) else leaf, value)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def exclusive(lock_file: Path, *, waiting_for: str) -> Iterator[None]:
    """Hold a lock that the kernel releases when the process dies; removes the lock file afterwards."""
    from filelock import FileLock, Timeout  # only commands that write corpora pay for the import

    lock = FileLock(lock_file)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        say(f"waiting for {waiting_for} by another process")
        lock.acquire()
    try:
        yield
    finally:
        lock_file.unlink(missing_ok=True)  # a waiting process then locks a new file
        lock.release()
