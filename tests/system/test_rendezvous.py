"""Restarted ranks meet each other, not the dead ones."""

import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from lm.system.rendezvous import meet

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
