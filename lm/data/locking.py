"""Locks on files and folders; the kernel releases them when their process dies."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lm.system.errors import UserError

NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
"""What file systems without locks answer: NFS without its lock service, Lustre mounted without `flock`, some FUSE."""


@contextmanager
def locked(path: Path, *, opener: Callable[[], int], on_wait: Callable[[], None]) -> Iterator[int]:
    """Lock the file or folder at `path`, which `opener` creates if needed; yields its descriptor."""
    while True:
        descriptor = opener()
        try:
            if not try_lock(descriptor, path=path, key="data.root"):
                on_wait()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if is_at(path, descriptor):  # its last owner may have renamed or removed it since we opened it
                yield descriptor
                return
        finally:
            os.close(descriptor)


def try_lock(descriptor: int, *, path: Path, key: str) -> bool:
    """Lock without waiting; False if another process holds the lock. `key` is the setting that names another place."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise UserError(
            f"{str(path.parent)!r} is on a file system that cannot lock files ({error.strerror}), so two processes "
            f"might write there at once. Try {key}=PATH on another one, or mount it with locks (Lustre: -o flock; NFS: "
            "with its lock service)"
        ) from None
    return True


def is_at(path: Path, descriptor: int) -> bool:
    """Whether the open file or folder is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
