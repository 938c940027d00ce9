"""The clocks of training and evaluation: what they count, and that they wait for a GPU."""

import time

import pytest
import torch

from lm.system.clock import Clock


def test_a_clock_counts_its_blocks_and_leaves_its_pauses_out() -> None:
    clock = Clock(torch.device("cpu"), seconds=100.0)
    began = time.monotonic()
    with clock.running():
        time.sleep(0.01)
        with clock.paused():
            time.sleep(0.05)
        time.sleep(0.01)
    passed = time.monotonic() - began
    stopped = clock.seconds
    assert 100.02 <= stopped <= 100 + passed - 0.05
    assert clock.seconds == stopped, "it does not run"


@pytest.mark.gpu
def test_a_clock_that_stops_has_waited_for_the_gpu() -> None:
    clock = Clock(torch.device("cuda"))
    matrix = torch.randn(4096, 4096, device="cuda")
    done = torch.cuda.Event()
    with clock.running():
        for _ in range(50):
            matrix = (matrix @ matrix).clamp_(-1, 1)
        done.record()  # type: ignore[no-untyped-call]
    assert done.query()
