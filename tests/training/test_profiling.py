"""The trace of a few steps: written where it is said to be, readable, and of nothing but those steps."""

import json
from pathlib import Path

import pytest

from lm.training.profiling import ROWS, TRACED
from tests.conftest import TINY, Command


def test_a_profile_holds_a_few_steps_and_the_costliest_operations_are_listed(command: Command, workspace: Path) -> None:
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


def test_a_run_that_is_too_short_says_so_and_leaves_no_trace(command: Command, workspace: Path) -> None:
    done = command("train.py", *TINY, "run_dir=run", "trainer.profile=true", "trainer.max_steps=4")
    assert "No trace was written: it takes 10 steps" in done.stdout
    assert not (workspace / "run/steps.pt.trace.json").exists()
    again = command("train.py", "resume=run", "trainer.profile=true", "trainer.max_steps=30")
    assert "A trace of 5 steps is in" in again.stdout


@pytest.mark.gpu
def test_a_profile_on_a_gpu_counts_the_gpus_time(command: Command, workspace: Path) -> None:
    command("train.py", *TINY, "run_dir=run", "trainer.profile=true", "trainer.device=cuda")
    events = json.loads((workspace / "run/steps.pt.trace.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
