"""Restarted ranks meet each other, not the dead ones; they wait for the first while it lives, and look where it is."""

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch.distributed import DistError, HashStore, TCPStore

from lm.system import rendezvous
from lm.system.errors import UserError
from lm.system.rendezvous import check_addresses, meet, signs_of_life, wait_for_first

SOON = timedelta(seconds=20)


def start(store: HashStore, size: int, *, first_comes: float = 0.0, others_come: float = 0.0) -> list[str]:
    """The names that ranks agree on, each in a thread that starts after its delay."""
    names: dict[int, str] = {}

    def come(rank: int) -> None:
        time.sleep(others_come if rank else first_comes)
        names[rank] = meet(store, rank=rank, size=size, timeout=SOON)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [names[rank] for rank in range(size)]


@pytest.mark.parametrize("late", [{"first_comes": 0.2}, {"others_come": 0.2}], ids=str)
def test_each_start_has_a_name_of_its_own(late: dict[str, float]) -> None:
    store = HashStore()
    starts = [start(store, size, **late) for size in (3, 3, 2)]
    assert [len(set(names)) for names in starts] == [1, 1, 1]
    assert len({names[0] for names in starts}) == 3


def test_a_rank_that_died_while_it_waited_is_not_taken_for_the_one_that_follows_it() -> None:
    store = HashStore()
    store.set("call of 1", "of a dead rank")
    names = start(store, 2, others_come=0.2)
    assert names[0] == names[1]


def test_the_first_rank_does_not_wait_for_ever() -> None:
    with pytest.raises(RuntimeError, match="rank 1 has not joined in 0:00:00"):
        meet(HashStore(), rank=0, size=2, timeout=timedelta(seconds=0.1))


def test_the_others_wait_while_the_first_rank_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes several times as long as they would wait for a silent one, and they say so now and then."""
    monkeypatch.setattr(rendezvous, "BEAT", 0.02)
    monkeypatch.setattr(rendezvous, "PATIENCE", 0.3)
    store, told, ended = HashStore(), [], []

    def work() -> None:
        with signs_of_life(store, "wait 1"):
            time.sleep(1)
            ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    wait_for_first(store, "wait 1", timeout=timedelta(seconds=0.25), notice=told.append)
    assert ended and 1 <= len(told) <= 3
    assert told[0] == "waiting for the first rank, which has been preparing for 0 minutes"
    thread.join()


def test_the_others_give_up_on_a_silent_first_rank() -> None:
    with pytest.raises(DistError, match=r"no sign of life for 0:00:00\.1"):
        wait_for_first(HashStore(), "wait 1", timeout=timedelta(seconds=0.1), notice=print)


def test_a_rank_that_waits_for_long_asks_the_store_about_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only its own pauses move."""
    pauses: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append)
    monkeypatch.setattr(rendezvous, "time", clock)
    with pytest.raises(DistError, match=r"no sign of life for 0:05:00"):
        wait_for_first(HashStore(), "wait 1", timeout=timedelta(minutes=5), notice=lambda _: None)
    assert len(pauses) < 350 and max(pauses) <= 1
    assert pauses[0] < 0.05, "where the first rank is quick, the others are too"


def test_a_lost_store_does_not_hide_why_the_first_rank_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "BEAT", 0.01)
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False)
    unhandled: list[object] = []
    monkeypatch.setattr(threading, "excepthook", unhandled.append)
    with pytest.raises(OSError, match="no space left"), signs_of_life(store, "wait 1"):
        del host
        time.sleep(0.1)
        raise OSError("no space left")
    assert not unhandled
    with pytest.raises(RuntimeError):  # it was lost indeed
        store.set("a", "")


def resolves(names: dict[str, str]) -> Callable[..., list[tuple[int, int, int, str, tuple[str, int]]]]:
    def look_up(host: str, *_: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        if host not in names:
            raise socket.gaierror(f"{host} is not known")
        return [(0, 0, 0, "", (names[host], 0))]

    return look_up


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "This host's name, here, resolves to 127.0.1.1"),
        (
            {"GROUP_RANK": "1", "MASTER_ADDR": "localhost"},
            "localhost, which here is ::1.*--local-addr=ADDRESS on the first",
        ),
        ({"GROUP_RANK": "1"}, "This host's name, here, resolves to 127.0.1.1"),
        ({"GLOO_SOCKET_IFNAME": "lo,eth77"}, "names eth77, and this host's network interfaces are lo"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, None),
        ({"LOCAL_WORLD_SIZE": "4"}, None),
        ({"GLOO_SOCKET_IFNAME": "eth77", "LOCAL_WORLD_SIZE": "4"}, "names eth77"),
    ],
    ids=str,
)
@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_addresses_that_other_nodes_cannot_reach_are_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str | None, local_rank: str
) -> None:
    found = {"here": "127.0.1.1", "localhost": "::1", "first": "10.0.0.1"}
    monkeypatch.setattr(socket, "getaddrinfo", resolves(found))
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    common = {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "first", "LOCAL_RANK": local_rank}
    for key, value in (common | variables).items():
        monkeypatch.setenv(key, value)
    if message is None:
        check_addresses(4)
        return
    with pytest.raises(UserError, match=message) as refused:
        check_addresses(4)
    assert refused.value.report_here is (local_rank == "0"), "once on each node"


def test_a_name_that_is_not_known_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", resolves({}))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "nowhere")
    check_addresses(2)
