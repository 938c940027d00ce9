"""Locks, and file systems that have none."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from lm.data.locking import try_lock
from lm.system.errors import UserError
from lm.training.run_dir import RunDir


def test_a_lock_is_held_by_one_descriptor_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "file"
    one, other = (os.open(file, os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert try_lock(one, path=file, key="data.root") and not try_lock(other, path=file, key="data.root")
    os.close(one)
    assert try_lock(other, path=file, key="data.root")
    os.close(other)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP], ids=errno.errorcode.get)
def test_a_file_system_without_locks_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """As Lustre and NFS answer; no file system here does."""

    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    rule = f"is on a file system that cannot lock files \\({os.strerror(number)}\\)"
    with pytest.raises(UserError, match=f"{tmp_path}/run' {rule}.* Try run_dir=PATH on another one"):
        RunDir(tmp_path / "run")


def test_other_errors_of_a_lock_are_not_taken_for_that(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        try_lock(987_654, path=tmp_path, key="data.root")
