"""CPU settings, each tested in a new process because they persist, and clocks that wait for a GPU."""

import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lm.system.devices import Clock, pick_device, prepare_cpu
from lm.system.errors import UserError
from lm.system.memory import return_freed_memory
from lm.system.ranks import Ranks
from lm.training.provenance import commit
from tests.conftest import ROOT
from tests.helpers.emulated_cuda import emulated_cuda
from tests.helpers.forks import Fork


def printed_by(target: Callable[..., None], folder: Path, *arguments: object) -> str:
    child = Fork(target, *arguments, folder=folder)
    assert child.wait() == 0, child.err
    return child.out.strip()


def print_denormals(older_threads: bool) -> None:
    """Print how many denormals remain in each thread's quarter of a product."""
    if older_threads:
        torch.set_num_threads(4)
        torch.ones(1 << 22).mul(1.0)
    prepare_cpu(threads=4)
    bits = torch.full((1 << 22,), 1000, dtype=torch.int32)  # denormal in float32
    product = bits.view(torch.float32) * 1.0
    print((product.view(torch.int32) != 0).view(4, -1).sum(1).tolist())  # a thread computes a contiguous quarter


@pytest.mark.parametrize("older_threads", [False, True])
def test_denormals_are_flushed_on_every_thread_started_later(tmp_path: Path, older_threads: bool) -> None:
    left = 1 << 20 if older_threads else 0
    assert printed_by(print_denormals, tmp_path, older_threads) == str([0, left, left, left])


def print_faults(prepared: bool) -> None:
    """Print whether freed memory is kept, and whether it is returned afterwards."""

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(40 << 18)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    if prepared:
        prepare_cpu(threads=1)
    settled = [faults() for _ in range(40)][-1]
    return_freed_memory()
    print(settled < 100, faults() > 1000)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="page faults are counted, and saved, on Linux")
@pytest.mark.parametrize("prepared", [False, True])
def test_freed_memory_is_kept_until_it_is_returned(tmp_path: Path, prepared: bool) -> None:
    assert printed_by(print_faults, tmp_path, prepared) == f"{prepared} True"


def test_clock_excludes_pauses() -> None:
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
    assert clock.seconds == stopped, "the clock is stopped"


@pytest.mark.gpu
def test_stopping_a_clock_waits_for_the_gpu() -> None:
    clock = Clock(torch.device("cuda"))
    matrix = torch.randn(4096, 4096, device="cuda")
    done = torch.cuda.Event()
    with clock.running():
        for _ in range(50):
            matrix = (matrix @ matrix).clamp_(-1, 1)
        done.record()  # type: ignore[no-untyped-call]
    assert done.query()


def test_ranks_without_gpu_or_torchrun_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with emulated_cuda(), pytest.raises(UserError, match=r"4 ranks but 2 GPU\(s\). Try torchrun --nproc-per-node=2"):
        pick_device("auto", key="trainer.device", ranks=Ranks(2, 4, local_rank=2))
    monkeypatch.setenv("SLURM_NTASKS", "8")
    with pytest.raises(UserError, match=r"8 tasks without torchrun.*--nproc-per-node=8 train.py"):
        Ranks.from_environment()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Ranks.from_environment().size == 1


def test_commit_of_an_image_is_its_build_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LM_COMMIT", "abc")
    assert commit(tmp_path) == "abc" and commit(ROOT) != "abc"
