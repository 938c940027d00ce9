"""Locks on files and folders; the kernel releases them when their process dies."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path, *, opener: Callable[[], int], on_wait: Callable[[], None]) -> Iterator[int]:
    """Lock the file or folder at `path`, which `opener` creates if needed; yields its descriptor."""
    while True:
        descriptor = opener()
        try:
            if not try_lock(descriptor):
                on_wait()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if is_at(path, descriptor):  # its last owner may have renamed or removed it since we opened it
                yield descriptor
                return
        finally:
            os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock without waiting; False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_at(path: Path, descriptor: int) -> bool:
    """Whether the open file or folder is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
