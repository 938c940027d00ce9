"""CPU settings, each tested in a new process because they persist, and clocks that wait for a GPU."""

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch

from lm.system.devices import (
    Clock,
    Precision,
    autocast,
    check_precision,
    disable_tf32,
    matmul_precision,
    pick_device,
    precision_name,
    prepare_cpu,
)
from lm.system.errors import UserError
from lm.system.memory import return_freed_memory
from lm.system.ranks import Ranks
from lm.training.provenance import commit
from tests.conftest import ROOT, TINY, Command
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


# ---- precision -------------------------------------------------------------------------------------------------------


CPU = torch.device("cpu")


def flags() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


def test_tf32_is_allowed_only_in_training() -> None:
    before = flags()
    try:
        disable_tf32()
        assert flags() == ("highest", False)
        for precision in get_args(Precision):
            with pytest.raises(KeyError), matmul_precision(precision):
                expected = {"fp32": ("highest", False), "tf32": ("high", True), "bf16": ("highest", True)}
                assert flags() == expected[precision]
                raise KeyError
            assert flags() == ("highest", False), "also after an error"
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.parametrize("precision", get_args(Precision))
def test_only_bf16_autocasts_inside_the_context(precision: Precision) -> None:
    matrix = torch.randn(4, 4)
    with autocast(precision, CPU):
        assert (matrix @ matrix).dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
    assert (matrix @ matrix).dtype == torch.float32


def test_tf32_is_not_reported_on_older_gpus() -> None:
    for capability, promised in (((7, 0), False), ((8, 0), True)):
        with emulated_cuda(capability=capability):
            name = precision_name("tf32", torch.device("cuda"))
        assert ("with TF32 products" in name) is promised
        assert ("no effect here" in name) is not promised


def test_each_precision_works_on_cpu() -> None:
    names = [precision_name(precision, CPU) for precision in get_args(Precision)]
    assert len(set(names)) == len(names)
    for precision in get_args(Precision):
        check_precision(precision, CPU)


def test_bf16_run_is_evaluated_in_float32(command: Command, workspace: Path) -> None:
    """So results agree to the last digit, even on machines without bfloat16."""
    command("train.py", *TINY, "run_dir=run", "trainer.precision=bf16")
    command("evaluate.py", "checkpoint=run")
    summary = json.loads((workspace / "run/summary.json").read_text())
    evaluation = json.loads((workspace / "run/evaluation-step-40.json").read_text())
    assert evaluation["splits"]["test"]["perplexity"] == pytest.approx(summary["test"]["last"], rel=1e-6)
    weights = torch.load(workspace / "run/checkpoints/last.pt", weights_only=True)
    kept = [*weights["model"].values(), *(part for layer in weights["state"] for part in layer)]
    assert all(tensor.dtype == torch.float32 for tensor in kept)
