"""The trace of a few steps is written where the message says, is readable, and contains only those steps."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from lm.training.profiling import ROWS, TRACED, StepProfiler
from tests.conftest import TINY, Command


def test_profile_writes_trace_and_table(command: Command, workspace: Path) -> None:
    done = command("train.py", *TINY, "run_dir=run", "trainer.profile=true")
    trace = workspace / "run/steps.pt.trace.json"
    assert f"A trace of {TRACED} steps is in run/{trace.name}; open it with https://ui.perfetto.dev" in done.stdout
    names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
    assert sum(name.startswith("ProfilerStep#") for name in set(names)) == TRACED
    assert "aten::addmm" in names
    lines = done.stdout.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("operation") and "ms a step" in line)
    shares = [float(line.split()[-1].rstrip("%")) for line in lines[header + 2 : header + 2 + ROWS]]
    assert shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 100.5
    assert not list((workspace / "run").glob(".*partial"))


def test_too_short_run_writes_no_trace(command: Command, workspace: Path) -> None:
    done = command("train.py", *TINY, "run_dir=run", "trainer.profile=true", "trainer.max_steps=4")
    assert "No trace was written: it needs 10 steps" in done.stdout
    assert not (workspace / "run/steps.pt.trace.json").exists()
    again = command("train.py", "resume=run", "trainer.profile=true", "trainer.max_steps=30")
    assert "A trace of 5 steps is in" in again.stdout


def test_kernel_time_counts_once(tmp_path: Path) -> None:
    """Imitates torch's events for a GPU: an operation that includes its kernels' time, and the kernels."""
    profiler = StepProfiler(tmp_path, torch.device("cuda"))

    def event(key: str, device: DeviceType, time: float) -> SimpleNamespace:
        return SimpleNamespace(key=key, device_type=device, self_device_time_total=time, count=TRACED)

    events = [
        event("aten::mm", DeviceType.CPU, 9000),
        event("gemm_kernel", DeviceType.CUDA, 9000),
        event("aten::add", DeviceType.CPU, 1000),
        event("ProfilerStep*", DeviceType.CPU, 5),
    ]
    profiler._profile = SimpleNamespace(key_averages=lambda: events)  # type: ignore[assignment]
    report = profiler._report()
    assert "90.0%" in report and "10.0%" in report and "gemm_kernel" not in report


@pytest.mark.gpu
def test_gpu_profile_counts_gpu_time(command: Command, workspace: Path) -> None:
    command("train.py", *TINY, "run_dir=run", "trainer.profile=true", "trainer.device=cuda")
    events = json.loads((workspace / "run/steps.pt.trace.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
