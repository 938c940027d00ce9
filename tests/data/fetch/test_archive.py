"""Hostile and broken archives: only plain members of the layout are read, bounded, and damage is told."""

import io
import random
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lm.data.fetch.archive import Limits, open_members, open_zip_member
from lm.data.text.reading import Part
from lm.system.errors import UserError

LIMITS = Limits(member=10_000, content=1_000_000)
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


def read(archive: Path, *, limits: Limits = LIMITS) -> dict[str, Part]:
    return open_members(archive, patterns=["top/a*.txt"], limits=limits, scratch=archive.parent)


def contents(members: dict[str, Part]) -> dict[str, bytes]:
    return {f"top/{name}": member.open().read() for name, member in members.items()}


@pytest.mark.parametrize("mode", ["w:", "w:gz", "w:xz", "w:bz2"])
def test_members_come_out_as_they_went_in(tmp_path: Path, mode: str) -> None:
    long_name = entry("x" * 300 + "/a.txt", b"outside")  # needs a header before its header
    archive = write_tar(tmp_path / "a.tar", [long_name, *plain()], mode)
    assert contents(read(archive)) == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


def test_nothing_but_plain_members_of_the_layout_is_read(tmp_path: Path) -> None:
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
    assert contents(read(write_tar(tmp_path / "a.tgz", outside + plain()))) == FILES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tgz", "secret"]


def test_members_are_read_by_several_threads_at_once(tmp_path: Path) -> None:
    members = read(write_tar(tmp_path / "a.tgz", plain()))
    jobs = [(name, start) for name in sorted(FILES) for start in range(0, len(FILES[name]), 100)] * 3

    def part(job: tuple[str, int]) -> bool:
        name, start = job
        expected = FILES[name][start : start + 100]
        with members[name.removeprefix("top/")].open() as file:
            assert (file.seek(0, 2), file.seek(start), file.tell()) == (len(FILES[name]), start, start)
            assert file.read(7) + file.read(93) == expected
            return file.read() == FILES[name][start + 100 :]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(part, jobs))


def test_a_folder_gives_the_same_members(tmp_path: Path) -> None:
    (tmp_path / "top").mkdir()
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "top" / "b.txt").write_bytes(b"outside")
    members = read(tmp_path)
    assert contents(members) == FILES
    assert members["a9.txt"].size == len(FILES["top/a9.txt"])


def test_a_member_that_stands_twice_is_refused(tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "a.tgz", [*plain(), entry("top/a3.txt", b"other")])
    with pytest.raises(UserError, match=r"must hold each file once; it holds a3\.txt twice"):
        read(archive)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("x")
    with pytest.raises(UserError, match=r"must hold each file once; it holds '.*one/a\.txt' and '.*two/a\.txt'"):
        open_members(tmp_path, patterns=["one/a.txt", "two/a.txt"], limits=LIMITS, scratch=tmp_path)


def test_bombs_are_refused_before_they_burst(tmp_path: Path) -> None:
    zeros = bytes(LIMITS.member + 1)
    with pytest.raises(UserError, match=r"nothing exceeds 10\.0 kB; a90\.txt has 10\.0 kB"):
        read(write_tar(tmp_path / "a.tgz", [entry("top/a90.txt", zeros)]))
    passed_over = [entry(f"other{number}", zeros) for number in range(100)]
    with pytest.raises(UserError, match=r"it holds more than 1\.0 MB"):
        read(write_tar(tmp_path / "b.tgz", passed_over + plain()))
    # The bytes behind the end of the tar are read too, for the checksum.
    archive = write_tar(tmp_path / "c.tar", plain(), "w:")
    archive.write_bytes(archive.read_bytes() + bytes(1_000_000))
    with pytest.raises(UserError, match=r"it holds more than 1\.0 MB"):
        read(archive)


def test_a_header_without_end_is_refused_unread(tmp_path: Path) -> None:
    for kind in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME):
        info, _ = entry("x", kind=kind)
        info.size = 10**14
        (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT))
        with pytest.raises(UserError, match="must be a whole archive"):
            read(tmp_path / "a.tar", limits=Limits(10**16, 10**16))
    names = entry("x", b"y" * 10, kind=tarfile.GNUTYPE_LONGNAME)
    (tmp_path / "b.tar").write_bytes((names[0].tobuf(tarfile.GNU_FORMAT) + names[1].ljust(512, b"\0")) * 2000)
    with pytest.raises(UserError, match="must be a whole archive"):
        read(tmp_path / "b.tar", limits=Limits(10**9, 10**9))


def test_a_member_larger_than_the_disk_is_refused(tmp_path: Path) -> None:
    info, _ = entry("top/a1.txt")
    info.size = 10**17
    (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(UserError, match=r"reading '.*' needs 100000\.0 TB in .*data\.root=PATH"):
        read(tmp_path / "a.tar", limits=Limits(10**18, 10**18))


TAR = io.BytesIO()
with tarfile.open(fileobj=TAR, mode="w:") as whole:
    for info, content in plain():
        whole.addfile(info, io.BytesIO(content))


@given(keep=st.integers(0, len(TAR.getvalue())))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_tar_cut_anywhere_is_told_or_lacks_only_padding(tmp_path: Path, keep: int) -> None:
    (tmp_path / "a.tar").write_bytes(TAR.getvalue()[:keep])
    try:
        found = contents(read(tmp_path / "a.tar"))
    except UserError as error:
        assert "must be a whole archive" in str(error)
    else:
        assert found == FILES


@given(
    changes=st.lists(st.tuples(st.integers(0, len(TAR.getvalue()) - 1), st.integers(0, 255)), min_size=1, max_size=8)
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_tar_never_ends_in_a_traceback(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    data = bytearray(TAR.getvalue())
    for position, byte in changes:
        data[position] = byte
    (tmp_path / "a.tar").write_bytes(data)
    try:
        read(tmp_path / "a.tar")
    except UserError as error:
        assert "a.tar" in str(error)


@pytest.mark.parametrize("mode", ["w:gz", "w:xz", "w:bz2"])
def test_damage_of_the_compression_is_told(tmp_path: Path, mode: str) -> None:
    archive = write_tar(tmp_path / "a.tgz", plain(), mode)
    data = archive.read_bytes()
    for position in range(len(data) // 2, len(data), len(data) // 9):
        damaged = bytearray(data)
        damaged[position] ^= 0xFF
        archive.write_bytes(damaged)
        with pytest.raises(UserError, match="must be a whole archive"):
            read(archive)


def test_zip_members(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../text8", "outside")
        archive.writestr("bomb", bytes(LIMITS.member + 1))
        archive.writestr("text8", "inside")
        archive.writestr("twice", "one")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("twice", "two")
    opens, size = open_zip_member(path, "text8", limits=LIMITS)
    assert (opens().read(), size) == (b"inside", 6)
    with pytest.raises(UserError, match=r"nothing exceeds 10\.0 kB; bomb has 10\.0 kB"):
        open_zip_member(path, "bomb", limits=LIMITS)
    for name, times in [("twice", 2), ("none", 0)]:
        with pytest.raises(UserError, match=f"must hold one plain member {name}; it holds {times}"):
            open_zip_member(path, name, limits=LIMITS)
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"PK\x01\x02", 0, data.rindex(b"text8"))
    data[entry + 8] |= 1  # the flag of an encrypted member
    path.write_bytes(data)
    with pytest.raises(UserError, match="it is encrypted"):
        open_zip_member(path, "text8", limits=LIMITS)
