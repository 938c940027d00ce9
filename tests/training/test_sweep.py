"""Sweeps: runs and their directories; real processes that fail, stop and resume."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from lm.system.errors import UserError
from lm.training.run_dir import RunDir
from tests.conftest import TINY, Command
from tests.helpers.forks import TRAIN, fork_runs, launch

LAYERS = "full,sampled,hsm_freq,hsm_sim,dsoftmax,dsoftmax_star,adaptive"


def test_failed_run_does_not_stop_sweep_and_finished_are_skipped(
    command: Command, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = fork_runs(workspace, monkeypatch)
    sweep = ["-m", *(s for s in TINY if s != "output=full"), "output.cutoffs=[999],[9]", "run_dir=runs"]
    done = command("train.py", *sweep, check=1)
    assert "== run 2 of 2: runs/output.cutoffs-9 ==" in done.stdout
    failed = done.stderr.partition("1 of 2 runs failed:")[2]
    assert "runs/output.cutoffs-999: exit code 2" in failed
    assert "Traceback" not in done.stderr + "".join(run.err for run in runs)
    (row,) = json.loads((workspace / "runs/comparison/comparison.json").read_text())
    assert row["finished"]
    (_, suggested) = done.stdout.split("\nNext:\n")
    assert "--logdir runs\n" in suggested and "evaluate.py checkpoint=runs/output.cutoffs-9\n" in suggested
    assert "Test perplexity" in runs[1].out and "Next:" not in runs[1].out, "printed once, by the sweep"
    assert "resume=auto" not in runs[1].out, "the sweep adds it, not the user"

    (workspace / "runs/output.cutoffs-999").mkdir(exist_ok=True)
    (workspace / "runs/output.cutoffs-999/summary.json").write_text("{}")  # not a run
    before = (workspace / "runs/output.cutoffs-9/summary.json").stat().st_mtime_ns
    again = command("train.py", *sweep, check=1)
    assert "run 2 of 2: runs/output.cutoffs-9 is finished" in again.stdout
    assert (workspace / "runs/output.cutoffs-9/summary.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_ctrl_c_saves_and_sweep_resumes(command: Command, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = ["-m", *TINY, "seed=1,2", "run_dir=runs"]
    endless = [sys.executable, TRAIN, *sweep, "trainer.max_steps=1000000"]
    process = subprocess.Popen(
        endless, cwd=workspace, start_new_session=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    metrics = workspace / "runs/seed-1/metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "Stopped and saved at step" in output, "the child's output passes through"
    assert "Stopped in run 1 of 2: runs/seed-1. The same command continues from there." in output
    assert not (workspace / "runs/seed-2").exists()

    step = json.loads(metrics.read_text().splitlines()[-1])["step"] + 50
    runs = fork_runs(workspace, monkeypatch)
    command("train.py", *sweep, f"trainer.max_steps={step}")
    assert ["resumed  at step" in run.out for run in runs] == [True, False]
    assert all("Test perplexity" in run.out for run in runs)
    (row,) = json.loads((workspace / "runs/comparison/comparison.json").read_text())
    assert row["runs"] == 2, "they differ only in the seed"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel must tell a run that its sweep has died")
def test_killed_sweep_ends_its_run(workspace: Path) -> None:
    endless = [sys.executable, TRAIN, "-m", *TINY, "seed=1,2", "run_dir=runs", "trainer.max_steps=1000000"]
    process = subprocess.Popen(endless, cwd=workspace, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = workspace / "runs/seed-1/metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.01)
    process.kill()
    process.wait()
    for _ in range(1000):
        with contextlib.suppress(UserError), contextlib.closing(RunDir(workspace / "runs/seed-1")):
            break  # its lock has been released
        time.sleep(0.02)
    else:
        pytest.fail("the run goes on")
    assert "Stopped and saved at step" in (workspace / "runs/seed-1/run.log").read_text()
    assert not (workspace / "runs/seed-2").exists()


@pytest.mark.slow
def test_sweep_over_external_experiments(command: Command, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run is a separate process, which must find the same configs from any folder."""
    folder = workspace / "mine"
    (folder / "experiment").mkdir(parents=True)
    for name, seed in (("first", 3), ("second", 4)):
        (folder / f"experiment/{name}.yaml").write_text(f"# @package _global_\nseed: {seed}\n")
    (folder / "half.yaml").write_text("defaults: [train, _self_]\ntrainer: {max_steps: 20}\n")
    runs = fork_runs(workspace, monkeypatch)
    flags = ["-m", "--config-dir", "mine", "--config-name=half", "hydra.sweep.dir='else where'"]
    settings = [text for text in TINY if "max_steps" not in text]
    command("train.py", *flags, *settings, "experiment=glob(*,exclude=[c*,e*,o*,p*,small*,t*,w*,z*])")
    homes = sorted((workspace / "else where").glob("*/summary.json"))
    assert [path.parent.name for path in homes] == ["experiment-first", "experiment-second"]
    assert [json.loads(path.read_text())["step"] for path in homes] == [20, 20]
    assert [yaml.safe_load((path.parent / "config.yaml").read_text())["seed"] for path in homes] == [3, 4]
    assert all(run.wait() == 0 for run in runs)


@pytest.mark.slow
def test_experiment_defines_its_sweep(command: Command, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = fork_runs(workspace, monkeypatch)
    command("train.py", "experiment=compare", *TINY[:-1], "output=full,adaptive", "trainer.max_seconds=null")
    assert all(run.wait() == 0 for run in runs)
    assert sorted(p.parent.name for p in workspace.glob("runs/*/*/summary.json")) == ["output-adaptive", "output-full"]


@pytest.mark.slow
def test_sweep_of_dry_runs(command: Command, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = fork_runs(workspace, monkeypatch)
    command("train.py", "-m", *TINY[:-1], "output=glob(hsm*,exclude=hsm_h*)", "trainer.dry_run=true")
    assert [run.wait() for run in runs] == [0, 0]
    assert all("output.classes" in run.out for run in runs)
    assert not list(workspace.glob("runs/*/*/config.yaml"))


@pytest.mark.slow
def test_all_seven_layers_are_compared(workspace: Path) -> None:
    small = ["trainer.max_steps=30", "trainer.log_every_steps=5", "model.hidden_size=32", "trainer.threads=1"]
    done = launch("experiment=compare", "data=pydoc", *small, folder=workspace)
    assert done.returncode == 0, done.stderr
    folder = workspace / "runs/compare-pydoc-max_steps-30-hidden_size-32/comparison"
    rows = json.loads((folder / "comparison.json").read_text())
    assert sorted(row["layer"] for row in rows) == sorted(LAYERS.split(","))
    assert all(row["finished"] and row["peak_memory_gib"] > 0 and row["speed_up_over_full"] > 0 for row in rows)
    assert len(list(folder.glob("*.png"))) == len(list(folder.glob("*.svg"))) == 2
