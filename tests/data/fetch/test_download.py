"""Downloads from a real server: whatever it does, the target is whole and right, or it is not there."""

import hashlib
import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lm.data.fetch.download import Patience, download
from lm.system.errors import UserError
from tests.helpers.http_server import closed_port, serving

CONTENT = random.Random(1).randbytes(1_000_000)
OTHER = random.Random(2).randbytes(900_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
QUICK = Patience(timeout=0.3, attempts=4, pause=0.01)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "text.zip"


def get(url: str, target: Path, *, size: int | None = None, sha256: str | None = SHA256) -> None:
    download(url, target, size=size, sha256=sha256, patience=QUICK)


def leave_part(target: Path, url: str, content: bytes, mark: str) -> None:
    """What a killed download leaves."""
    target.parent.mkdir()
    (target.parent / ".text.zip.part").write_bytes(content)
    note = {"url": url, "mark": mark, "size": len(CONTENT)}
    (target.parent / ".text.zip.part.json").write_text(json.dumps(note))


def assert_whole(target: Path, content: bytes = CONTENT) -> None:
    assert target.read_bytes() == content
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_a_file_is_fetched_whole(target: Path) -> None:
    with serving(CONTENT) as server:
        get(server.url, target, size=len(CONTENT))
        assert server.ranges == [None]
    assert_whole(target)


def test_a_file_of_untold_length_is_fetched_too(target: Path) -> None:
    with serving(CONTENT, "unsized") as server:
        get(server.url, target, size=len(CONTENT))
    assert_whole(target)


def test_a_connection_that_breaks_is_resumed_where_it_broke(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(CONTENT, "cut 300000", "cut 500000") as server:
        get(server.url, target)
        assert server.ranges == [None, "bytes=300000-", "bytes=800000-"]
        assert server.requests[1]["If-Range"] == server.etag
        assert server.sent == len(CONTENT)
    assert_whole(target)
    assert "the connection ended after 300,000 of 1,000,000 bytes; attempt 2 in 0.01 s" in capsys.readouterr().out


def test_a_stalled_connection_is_resumed(target: Path) -> None:
    with serving(CONTENT, "stall 300000") as server:
        get(server.url, target)
        assert server.ranges == [None, "bytes=300000-"]
    assert_whole(target)


def test_a_server_without_ranges_begins_anew(target: Path) -> None:
    with serving(CONTENT, "cut 300000", "whole") as server:
        get(server.url, target)
        assert server.ranges == [None, "bytes=300000-"]
    assert_whole(target)


def test_without_a_mark_nothing_is_resumed(target: Path) -> None:
    with serving(CONTENT, "cut 300000") as server:
        server.marked = False
        get(server.url, target)
        assert server.ranges == [None, None]
    assert_whole(target)


@pytest.mark.parametrize("heeds_condition", [True, False])
def test_a_file_that_changed_between_attempts_begins_anew(target: Path, heeds_condition: bool) -> None:
    with serving(OTHER, "cut 300000") as server:
        server.heeds_condition = heeds_condition
        with pytest.raises(UserError, match="must be the file with the sha256"):
            get(server.url, target)
        server.script = ["cut 300000", "503", "503", "503", "503"]
        with pytest.raises(UserError, match="503"):
            get(server.url, target)
        server.content = CONTENT
        get(server.url, target)
    assert_whole(target)


def test_a_file_that_became_shorter_begins_anew(target: Path) -> None:
    with serving(CONTENT[:1000]) as server:
        server.heeds_condition = False
        leave_part(target, server.url, CONTENT[:5000], mark='"old"')
        get(server.url, target, sha256=hashlib.sha256(CONTENT[:1000]).hexdigest())
        assert server.ranges == ["bytes=5000-", None]
    assert_whole(target, CONTENT[:1000])


def test_a_part_of_another_address_is_not_gone_on_with(target: Path) -> None:
    with serving(CONTENT) as server:
        leave_part(target, "http://127.0.0.1:1/other", OTHER[:1000], mark=server.etag)
        get(server.url, target)
        assert server.ranges == [None]
    assert_whole(target)


def test_a_damaged_part_is_found_and_begun_anew(target: Path) -> None:
    with serving(CONTENT) as server:
        leave_part(target, server.url, bytes(5000), mark=server.etag)
        get(server.url, target)
        assert server.ranges == ["bytes=5000-", None]
    assert_whole(target)


def test_a_part_that_is_complete_is_only_verified(target: Path) -> None:
    with serving(CONTENT) as server:
        leave_part(target, server.url, CONTENT, mark=server.etag)
        get(server.url, target)
        assert server.requests == []
    assert_whole(target)


def test_a_busy_server_is_asked_again_and_in_the_end_given_up(target: Path) -> None:
    with serving(CONTENT, "503", "500", "429") as server:
        get(server.url, target)
        assert len(server.requests) == 4
    assert_whole(target)
    target.unlink()
    with serving(CONTENT, *["503"] * 9) as server:
        with pytest.raises(UserError, match=r"cannot download http.*: the server answers 503 Service Unavailable"):
            get(server.url, target)
        assert len(server.requests) == QUICK.attempts


@pytest.mark.parametrize("status", ["404", "403", "410"])
def test_what_another_attempt_cannot_mend_is_told_at_once(target: Path, status: str) -> None:
    with serving(CONTENT, status) as server:
        with pytest.raises(UserError, match=f"the server answers {status}") as raised:
            get(server.url, target)
        assert len(server.requests) == 1
        assert all(part in str(raised.value) for part in (server.url, str(target), "data.archive=PATH", "data.url=URL"))
    assert not target.parent.exists()


def test_a_wrong_checksum_is_told_with_the_one_found(target: Path) -> None:
    found = hashlib.sha256(OTHER).hexdigest()
    with serving(OTHER) as server, pytest.raises(UserError, match=f"{SHA256}; this one has {found}.*sha256={found}"):
        get(server.url, target)
    assert not target.parent.exists()


def test_a_wrong_size_is_told_before_anything_is_fetched(target: Path) -> None:
    with serving(CONTENT) as server:
        with pytest.raises(UserError, match="it offers 1,000,000 bytes instead of 7"):
            get(server.url, target, size=7)
        assert len(server.requests) == 1
    assert not target.parent.exists()


def test_no_network_is_told_at_once_with_what_to_do(target: Path) -> None:
    url = f"http://127.0.0.1:{closed_port()}/text.zip"
    with pytest.raises(UserError, match="Connection refused") as raised:
        get(url, target)
    assert all(part in str(raised.value) for part in (url, str(target), "data.archive=PATH"))
    assert not target.parent.exists()


def test_what_was_fetched_is_kept_when_the_server_goes_away(target: Path) -> None:
    with serving(CONTENT, "cut 300000", *["503"] * 9) as server:
        with pytest.raises(UserError, match="503"):
            get(server.url, target)
        server.script = []
        get(server.url, target)
        assert server.ranges[-1] == "bytes=300000-"
    assert_whole(target)


def test_a_file_larger_than_the_disk_is_refused_before_it_is_written(target: Path) -> None:
    with (
        serving(CONTENT, "huge") as server,
        pytest.raises(UserError, match=r"needs 100000\.0 TB in '.*folder', where .* are free\..*data\.root=PATH"),
    ):
        get(server.url, target)
    assert not target.parent.exists()


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with serving(CONTENT) as server, pytest.raises(UserError, match=r"cannot write '.*file/text\.zip': .*data\.root"):
        get(server.url, tmp_path / "file" / "text.zip")


CHILD = """
import sys, resource
from pathlib import Path
from lm.data.fetch.download import Patience, download
url, target, limit = sys.argv[1:]
if limit != "none":
    import signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
download(url, Path(target), patience=Patience(pause=0.01))
"""


def start_child(url: str, target: Path, *, limit: str = "none") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, url, str(target), limit]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_disk_that_fills_up_is_told_and_the_next_run_goes_on(target: Path) -> None:
    """A limit on the size of files stands in for the disk."""
    with serving(CONTENT) as server:
        child = start_child(server.url, target, limit="400000")
        assert "UserError: cannot write" in child.communicate()[1]
        assert not target.exists()
        get(server.url, target)
        assert server.ranges == [None, "bytes=400000-"]
    assert_whole(target)


def test_killed_at_random_moments_then_again_gives_the_same_bytes(target: Path) -> None:
    """The server is slow, the children die when they have got a random amount, the last one is left alone."""
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
        begun = [int(wanted[6:-1]) for wanted in server.ranges[1:] if wanted]
        assert len(begun) == 3
        assert all(begin >= amount for begin, amount in zip(begun, amounts, strict=True))
    assert_whole(target)


def test_two_at_once_fetch_the_file_once(target: Path) -> None:
    with serving(CONTENT, "slow") as server:
        other = threading.Thread(target=get, args=(server.url, target))
        other.start()
        get(server.url, target)
        other.join()
        assert server.sent == len(CONTENT)
    assert_whole(target)
