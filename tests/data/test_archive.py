"""Archives: only regular members of the expected layout are read, and damage is an error."""

import bz2
import gzip
import hashlib
import io
import lzma
import random
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lm.data.archive import Archive, download
from lm.system.errors import UserError
from tests.helpers.http_server import serving

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


# ---- downloads -------------------------------------------------------------------------------------------------------


CONTENT = random.Random(1).randbytes(1_000_000)
OTHER = random.Random(2).randbytes(900_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TIMEOUT_S": 0.3, "ATTEMPTS": 4, "PAUSE_S": 0.01}.items():
        monkeypatch.setattr(f"lm.data.archive.{name}", value)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "text.zip"


def get(url: str, target: Path, *, size: int | None = None) -> None:
    download(url, target, size=size, checksum=SHA256)


def leave_part(target: Path, content: bytes) -> None:
    """Create the partial file of a killed download."""
    target.parent.mkdir()
    for suffix, data in [("part", content), ("lock", b"")]:
        (target.parent / f".text.zip.{suffix}").write_bytes(data)


def assert_complete(target: Path) -> None:
    assert target.read_bytes() == CONTENT
    assert [path.name for path in target.parent.iterdir()] == [target.name]


@pytest.mark.parametrize(
    ("script", "ranges"),
    [
        ([], [None]),
        (["unsized"], [None]),
        (["cut 300000", "cut 500000"], [None, "bytes=300000-", "bytes=800000-"]),
        (["stall 300000"], [None, "bytes=300000-"]),
        (["cut 300000", "whole"], [None, "bytes=300000-"]),
        (["503", "500", "429"], [None] * 4),
    ],
    ids=["one response", "unknown length", "resumed", "stalled", "server without ranges", "busy server"],
)
def test_complete_whatever_the_server_does(target: Path, script: list[str], ranges: list[str | None]) -> None:
    with serving(CONTENT, *script) as server:
        get(server.url, target, size=len(CONTENT))
        assert server.ranges == ranges
    assert_complete(target)


@pytest.mark.parametrize(
    ("part", "ranges"),
    [(CONTENT[:5000], ["bytes=5000-"]), (CONTENT, []), (CONTENT + b"more", ["bytes=1000004-", None])],
    ids=["incomplete", "complete", "too long"],
)
def test_part_file_is_resumed(target: Path, part: bytes, ranges: list[str | None]) -> None:
    leave_part(target, part)
    with serving(CONTENT) as server:
        get(server.url, target, size=len(CONTENT))
        assert server.ranges == ranges
    assert_complete(target)


def test_damaged_part_is_removed(target: Path) -> None:
    leave_part(target, bytes(5000))
    with serving(CONTENT) as server:
        with pytest.raises(UserError, match=SHA256):
            get(server.url, target)
        get(server.url, target)
    assert_complete(target)


@pytest.mark.parametrize(("status", "requests"), [("404", 1), ("403", 1), ("503", 4)])
def test_error_status_names_file_and_settings(target: Path, status: str, requests: int) -> None:
    with serving(CONTENT, *[status] * 9) as server:
        with pytest.raises(UserError, match=status) as raised:
            get(server.url, target)
        assert len(server.requests) == requests
        assert all(part in str(raised.value) for part in (server.url, str(target), "data.archive=PATH", "data.url=URL"))
    assert not target.exists()


def test_redirect_to_an_invalid_url_raises(target: Path) -> None:
    with (
        serving(CONTENT, "302 http://[::1") as server,
        pytest.raises(UserError, match=r"Cannot download .*: Invalid IPv6"),
    ):
        get(server.url, target)


def test_wrong_checksum_is_reported_with_the_actual_one(target: Path) -> None:
    actual = hashlib.sha256(OTHER).hexdigest()
    with serving(OTHER) as server, pytest.raises(UserError, match=f"{SHA256}; got {actual}.*data.sha256={actual}"):
        get(server.url, target)
    assert not target.exists()


@pytest.mark.parametrize(("script", "size"), [("serve", 7), ("unsized", 900_000)])
def test_wrong_size_raises(target: Path, script: str, size: int) -> None:
    with serving(CONTENT, script) as server:
        with pytest.raises(UserError, match=server.url):
            get(server.url, target, size=size)
        assert len(server.requests) == 1
    assert not target.exists()


def test_received_bytes_are_kept_after_giving_up(target: Path) -> None:
    with serving(CONTENT, "cut 300000", *["503"] * 9) as server:
        with pytest.raises(UserError, match="503"):
            get(server.url, target)
        server.script = []
        get(server.url, target)
        assert server.ranges[-1] == "bytes=300000-"
    assert_complete(target)


CHILD = """
import sys, resource, signal
from pathlib import Path
from lm.data.archive import download
url, target, limit = sys.argv[1:]
if limit != "none":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
download(url, Path(target))
"""


def start_child(url: str, target: Path, *, limit: str = "none") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, url, str(target), limit]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_full_disk_is_an_error_and_the_next_run_resumes(target: Path) -> None:
    """Simulates a full disk with a file-size limit."""
    with serving(CONTENT) as server:
        child = start_child(server.url, target, limit="400000")
        assert "OSError" in child.communicate()[1]
        assert not target.exists()
        get(server.url, target)
        assert server.ranges == [None, "bytes=400000-"]
    assert_complete(target)


def test_killed_at_random_then_repeated_gives_the_same_bytes(target: Path) -> None:
    amounts = sorted(random.Random(3).sample(range(1, 900_000), 3))
    with serving(CONTENT) as server:
        for amount in amounts:
            server.script = ["slow"]
            child = start_child(server.url, target)
            part = target.parent / ".text.zip.part"
            while not part.exists() or part.stat().st_size < amount:
                assert child.poll() is None, child.communicate()
                time.sleep(0.001)
            child.kill()
            child.communicate()
            assert not target.exists()
        get(server.url, target)
        starts = [int(header[6:-1]) for header in server.ranges[1:] if header]
        assert all(start >= amount for start, amount in zip(starts, amounts, strict=True))
    assert_complete(target)


def test_concurrent_downloads_transfer_the_file_once(target: Path) -> None:
    with serving(CONTENT, "slow") as server:
        other = threading.Thread(target=get, args=(server.url, target))
        other.start()
        get(server.url, target)
        other.join()
        assert server.sent == len(CONTENT)
    assert_complete(target)
