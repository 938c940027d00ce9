"""Collective operations of real processes on one machine."""

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from lm.system.errors import UserError
from lm.system.ranks import Ranks
from tests.helpers.ranks import TWO_GPUS, run_ranks


def exchange_and_agree(device_type: str) -> None:
    ranks = Ranks.from_environment()
    device = torch.device(device_type, ranks.rank) if device_type == "cuda" else torch.device("cpu")
    ranks.join(device)
    mine = torch.tensor([ranks.rank + 1.0], device=device)
    assert ranks.sum(mine.clone()).item() == 3
    assert ranks.mean(mine.clone()).item() == 1.5
    states = ranks.gather_streams(mine.expand(1, 2, 3))
    assert states[0, :, 0].tolist() == [1, 1, 2, 2]
    assert ranks.columns(6) == slice(3 * ranks.rank, 3 * ranks.rank + 3)
    assert ranks.from_rank0(lambda: ranks.rank + 7) == 7
    lone = {"lone": 1} if ranks.rank else {}
    assert ranks.differing({"same": 1, "other": ranks.rank, **lone}) == ["lone", "other"]

    def mistake() -> None:
        raise UserError("a mistake")

    with pytest.raises(UserError, match="a mistake"):
        ranks.from_rank0(mistake)

    # Only the second rank is signaled; both see it in the next step.
    heard = []
    for step in range(5):
        heard.append(ranks.agree(stop=15 if ranks.rank and step == 2 else 0, seconds=step + 100 * ranks.rank))
    assert [stop for stop, _ in heard] == [0, 0, 0, 15, 0], heard
    assert [seconds for _, seconds in heard[1:]] == [0, 1, 2, 3], heard
    assert ranks.last_agreement() == (0, 4)
    print(f"rank {ranks.rank} is heard")
    ranks.leave()


@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=TWO_GPUS)])
def test_ranks_exchange_and_agree(tmp_path: Path, device_type: str) -> None:
    ended = run_ranks(exchange_and_agree, device_type, ranks=2, folder=tmp_path)
    assert ended.codes == [0, 0], ended.err
    assert ended.out.strip() == "rank 0 is heard"


def prepare_for_long() -> None:
    import lm.system.ranks

    lm.system.ranks.TIMEOUT = timedelta(seconds=3)
    ranks = Ranks.from_environment()
    ranks.join(torch.device("cpu"))
    assert ranks.from_rank0(lambda: time.sleep(5) or "prepared") == "prepared"
    ranks.leave()


@pytest.mark.slow
def test_rank0_may_prepare_longer_than_timeout(tmp_path: Path) -> None:
    ended = run_ranks(prepare_for_long, ranks=2, folder=tmp_path)
    assert ended.codes == [0, 0], ended.err


def test_single_process_needs_no_group() -> None:
    ranks = Ranks()
    assert ranks.is_rank0
    assert ranks.columns(5) == slice(0, 5)
    assert ranks.from_rank0(lambda: "made") == "made"
    assert ranks.differing({"a": 1}) == []
    assert ranks.agree(stop=2, seconds=1.5) == (2, 1.5)
