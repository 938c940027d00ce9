"""Archives: only regular members of the expected layout are read, and damage is an error."""

import bz2
import gzip
import io
import lzma
import random
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lm.data.archive import Archive
from lm.system.errors import UserError

ARCHIVE = Archive("a.tgz", ("http://localhost/a.tgz",), members=("top/a*.txt",))
FILES = {f"top/a{number}.txt": random.Random(number).randbytes(number * 300) for number in range(20)}


def entry(
    name: str, content: bytes = b"", *, kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(content), kind, link
    return info, content


def write_tar(path: Path, entries: list[tuple[tarfile.TarInfo, bytes]], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for info, content in entries:
            tar.addfile(info, io.BytesIO(content))
    return path


def plain() -> list[tuple[tarfile.TarInfo, bytes]]:
    return [entry(name, content) for name, content in FILES.items()]


def read(path: Path, scratch: Path) -> dict[str, bytes]:
    return {f"top/{name}": file.open().read() for name, file in ARCHIVE.open(path, scratch=scratch).items()}


@pytest.mark.parametrize("mode", ["w:", "w:gz", "w:xz", "w:bz2"])
def test_tar_members_are_unchanged(tmp_path: Path, mode: str) -> None:
    long_name = entry("x" * 300 + "/a.txt", b"outside")  # needs a header before its header
    assert read(write_tar(tmp_path / "a.tar", [long_name, *plain()], mode), tmp_path / "scratch") == FILES


def test_only_regular_members_of_the_layout_are_extracted(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    outside = [
        entry("../top/a90.txt", b"x"),
        entry("/top/a91.txt", b"x"),
        entry("top/../top/a92.txt", b"x"),
        entry("top/deeper/a93.txt", b"x"),
        entry("a94.txt", b"x"),
        entry("top/b95.txt", b"x"),
        entry("top/a96.txt", kind=tarfile.SYMTYPE, link="../secret"),
        entry("top/a97.txt", kind=tarfile.LNKTYPE, link="top/a1.txt"),
        entry("top/a98.txt", kind=tarfile.FIFOTYPE),
        entry("top/a99.txt", kind=tarfile.CHRTYPE),
        entry("top/a100.txt", kind=tarfile.DIRTYPE),
    ]
    assert read(write_tar(tmp_path / "a.tgz", outside + plain()), tmp_path / "scratch") == FILES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tgz", "scratch", "secret"]
    assert len(list((tmp_path / "scratch").rglob("*.txt"))) == len(FILES)


def test_zip_and_folder_give_the_same_members(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in (FILES | {"../top/a90.txt": b"x", "top/b.txt": b"x", "top/": b""}).items():
            archive.writestr(name, content)
    assert read(tmp_path / "a.zip", tmp_path / "scratch") == FILES
    assert read(tmp_path / "scratch", tmp_path / "unused") == FILES


TAR = io.BytesIO()
with tarfile.open(fileobj=TAR, mode="w:") as complete:
    for info, content in plain():
        complete.addfile(info, io.BytesIO(content))


@given(
    changes=st.lists(st.tuples(st.integers(0, len(TAR.getvalue()) - 1), st.integers(0, 255)), min_size=1, max_size=8),
    keep=st.integers(0, len(TAR.getvalue())),
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_tar_is_at_worst_a_user_error(tmp_path: Path, changes: list[tuple[int, int]], keep: int) -> None:
    data = bytearray(TAR.getvalue())
    for position, byte in changes:
        data[position] = byte
    (tmp_path / "a.tar").write_bytes(data[:keep])
    try:
        read(tmp_path / "a.tar", tmp_path / "scratch")
    except UserError as error:
        assert "a.tar" in str(error)


@pytest.mark.parametrize("mode", ["w:gz", "w:xz", "w:bz2"])
def test_damaged_compression_raises(tmp_path: Path, mode: str) -> None:
    archive = write_tar(tmp_path / "a.tgz", plain(), mode)
    data = archive.read_bytes()
    for position in range(len(data) // 2, len(data), len(data) // 9):
        damaged = bytearray(data)
        damaged[position] ^= 0xFF
        archive.write_bytes(damaged)
        with pytest.raises(UserError, match=r"a\.tgz"):
            read(archive, tmp_path / "scratch")


@pytest.mark.parametrize("mode", ["w:gz", "w:xz", "w:bz2"])
def test_damaged_second_stream_raises(tmp_path: Path, mode: str) -> None:
    """Python's own readers ignore it; the first stream ends between two members."""
    whole = write_tar(tmp_path / "a.tar", plain(), "w:").read_bytes()
    cut = whole.index(b"top/a9.txt")
    compress: Callable[[bytes], bytes] = {"w:gz": gzip.compress, "w:xz": lzma.compress, "w:bz2": bz2.compress}[mode]
    first, second = compress(whole[:cut]), bytearray(compress(whole[cut:]))
    (tmp_path / "a.tgz").write_bytes(first + second)
    assert read(tmp_path / "a.tgz", tmp_path / "whole") == FILES
    second[1] ^= 0x10
    (tmp_path / "a.tgz").write_bytes(first + second)
    with pytest.raises(UserError, match=r"a\.tgz"):
        read(tmp_path / "a.tgz", tmp_path / "scratch")


def test_encrypted_zip_raises(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("top/a1.txt", "inside")
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"a\.zip"):
        read(path, tmp_path / "scratch")
