"""Sweeps: which runs, in which directories; real processes that fail, are stopped, and resume."""

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

import lm.runs.sweep
from lm.config.command_line import CommandLine
from lm.config.commands import TrainConfig
from lm.runs.directory import RunDir
from lm.runs.sweep import LONGEST_NAME, Job
from lm.system.errors import UserError
from tests.conftest import TINY, Command
from tests.helpers.forks import TRAIN, Fork, train

LAYERS = "full,sampled,hsm_freq,hsm_sim,dsoftmax,dsoftmax_star,adaptive"
RUNS = Path("runs")


def plan(*arguments: str) -> list[Job]:
    return lm.runs.sweep.plan(CommandLine(arguments, name="train", schema=TrainConfig))


def names(*arguments: str) -> list[str]:
    return [str(job.path.relative_to(RUNS)) for job in plan("-m", *arguments)]


def launch(*arguments: str, folder: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, TRAIN, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["output=full,adaptive", "experiment=text8"], ["text8/full", "text8/adaptive"]),
        (["output=full,adaptive", "optim.lr=0.05"], ["pydoc-lr-0.05/full", "pydoc-lr-0.05/adaptive"]),
        (["seed=range(1,3)", "experiment=zipf"], ["zipf/seed-1", "zipf/seed-2"]),
        (["model=choice(small,lstm)", "seed=4"], ["pydoc-seed-4/small", "pydoc-seed-4/lstm"]),
        (["output=glob(hsm*,exclude=hsm_h*)"], ["pydoc/hsm_freq", "pydoc/hsm_sim"]),
        (["experiment=text8,zipf", "output=full"], ["sweep-full/text8", "sweep-full/zipf"]),
        (
            ["data=pydoc,zipf", "output=full,sampled"],
            [f"sweep/{d}-{o}" for d in ("pydoc", "zipf") for o in ("full", "sampled")],
        ),
        (["output.cutoffs=[10,20],[30]"], ["pydoc/cutoffs-10-20", "pydoc/cutoffs-30"]),
        (["seed=1,1,2"], ["pydoc/seed-1", "pydoc/seed-2"]),
        (["seed=1,2", "seed=3"], ["pydoc-seed-3/adaptive"]),
        (["output=full,adaptive", "trainer.max_epochs=9", "trainer.device=cpu"], ["pydoc/full", "pydoc/adaptive"]),
        (
            ["output=full,adaptive", "optim.schedule=linear", "trainer.max_epochs=9", "trainer.threads=1"],
            ["pydoc-schedule-linear-max_epochs-9/full", "pydoc-schedule-linear-max_epochs-9/adaptive"],
        ),
        (
            ["optim=adagrad,adam", "trainer.max_epochs=9"],
            ["pydoc-max_epochs-9/adagrad", "pydoc-max_epochs-9/adam"],
        ),
        (["optim.accumulator_start=1e+20,1"], ["pydoc/accumulator_start-1e+20", "pydoc/accumulator_start-1"]),
        (["++seed=1,2"], ["pydoc/seed-1", "pydoc/seed-2"]),
        (["trainer.max_epochs=1,2"], ["pydoc/max_epochs-1", "pydoc/max_epochs-2"]),
        (["seed=1,2", "hydra.verbose=true"], ["pydoc/seed-1", "pydoc/seed-2"]),
    ],
)
def test_directories_are_named_by_the_settings(overrides: list[str], expected: list[str]) -> None:
    assert names(*overrides) == expected


def test_the_flag_may_stand_anywhere() -> None:
    for place in range(3):
        arguments = ["data=zipf", "seed=1,2"]
        arguments.insert(place, "-m")
        assert [str(job.path) for job in plan(*arguments)] == ["runs/zipf/seed-1", "runs/zipf/seed-2"]


def test_a_folder_of_ones_own_and_paths_as_typed() -> None:
    text = "run_dir=my runs", "data=text", "data.dir=it's, (here)=$", "seed=1,2"
    first, second = plan("-m", *text)
    assert (first.path, second.path) == (Path("my runs/seed-1"), Path("my runs/seed-2"))
    assert first.overrides[:3] == ["data=text", "data.dir=it's, (here)=$", "seed=1"]
    assert first.overrides[3:] == ["run_dir=my runs/seed-1", "resume=auto"]
    assert names(*text[1:])[0] == "text-dir-it-s-here/seed-1"


def test_long_names_are_cut_and_still_differ() -> None:
    cutoffs = [",".join(str(n) for n in range(10, 50 + last)) for last in (0, 1)]
    found = names(*(f"output.cutoffs=[{c}]" for c in cutoffs[:1]), "seed=1,2")[0]
    other = names(f"output.cutoffs=[{cutoffs[1]}]", "seed=1,2")[0]
    assert found != other
    assert all(len(part) <= LONGEST_NAME for part in Path(found).parts)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["resume=runs/x", "seed=1,2"], "resume=runs/x names one run"),
        (["data.root='a b','a-b'"], "share the directory"),
        (["optim.lr=interval(0.1,1)"], "an interval has no list of values"),
        (["seed=range(0)"], "matches nothing"),
        (["seed=range(0)", "optim.lr=0"], "(?s)matches nothing.*optim.lr must be a number, above 0"),
    ],
)
def test_sweeps_that_cannot_be(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan("-m", *overrides)


@pytest.mark.parametrize("flag", [[], ["-m"]])
def test_an_experiment_defines_its_sweep(flag: list[str]) -> None:
    def sweeps(*arguments: str) -> bool:
        return CommandLine([*arguments, "experiment=compare"], name="train", schema=TrainConfig).is_multirun

    assert sweeps(*flag)
    assert names("experiment=compare") == [f"compare/{layer}" for layer in LAYERS.split(",")]
    assert not sweeps("hydra.mode=RUN")
    narrowed = plan(*flag, "experiment=compare", "output=full,adaptive")
    assert [str(job.path) for job in narrowed] == ["runs/compare/full", "runs/compare/adaptive"]


def fork_runs(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> list[Fork]:
    """The runs that sweeps in this process will start, which are forked from now on."""
    started: list[Fork] = []

    def start(command: list[str], *, env: dict[str, str], **_: object) -> Fork:
        assert command[:2] == [sys.executable, TRAIN]
        variables = {key: value for key, value in env.items() if os.environ.get(key) != value}
        started.append(Fork(train, *command[2:], folder=workspace, name=f"run-{len(started)}", **variables))
        return started[-1]

    monkeypatch.setattr(lm.runs.sweep.subprocess, "Popen", start)
    return started


def test_one_failure_does_not_stop_the_others_and_what_is_finished_is_skipped(
    command: Command, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = fork_runs(workspace, monkeypatch)
    sweep = ["-m", *(s for s in TINY if s != "output=full"), "output.cutoffs=[999],[9]", "run_dir=runs"]
    done = command("train.py", *sweep, check=1)
    assert "== run 2 of 2: runs/cutoffs-9 ==" in done.stdout
    failed = done.stderr.partition("1 of 2 runs failed:")[2]
    assert "runs/cutoffs-999: exit code 2" in failed
    assert "Traceback" not in done.stderr + "".join(run.err for run in runs)
    (row,) = json.loads((workspace / "runs/comparison/comparison.json").read_text())
    assert row["finished"]
    (_, suggested) = done.stdout.split("\nNext:\n")
    assert "--logdir runs\n" in suggested and "evaluate.py checkpoint=runs/cutoffs-9\n" in suggested
    assert "Test perplexity" in runs[1].out and "Next:" not in runs[1].out, "the sweep says it, once"
    assert "resume=auto" not in runs[1].out, "which nobody gave"

    (workspace / "runs/cutoffs-999").mkdir(exist_ok=True)
    (workspace / "runs/cutoffs-999/summary.json").write_text("{}")  # a directory that is not a run is no reason to stop
    before = (workspace / "runs/cutoffs-9/summary.json").stat().st_mtime_ns
    again = command("train.py", *sweep, check=1)
    assert "run 2 of 2: runs/cutoffs-9 is finished" in again.stdout
    assert (workspace / "runs/cutoffs-9/summary.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_ctrl_c_saves_the_current_run_and_ends_the_sweep_which_then_continues(
    command: Command, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_a_sweep_that_is_killed_leaves_no_run_behind(workspace: Path) -> None:
    endless = [sys.executable, TRAIN, "-m", *TINY, "seed=1,2", "run_dir=runs", "trainer.max_steps=1000000"]
    process = subprocess.Popen(endless, cwd=workspace, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = workspace / "runs/seed-1/metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.01)
    process.kill()
    process.wait()
    for _ in range(1000):
        with contextlib.suppress(UserError), contextlib.closing(RunDir(workspace / "runs/seed-1")):
            break  # nobody holds its lock any more
        time.sleep(0.02)
    else:
        pytest.fail("the run goes on")
    assert "Stopped and saved at step" in (workspace / "runs/seed-1/run.log").read_text()
    assert not (workspace / "runs/seed-2").exists()


def test_a_sweep_over_experiments_outside_the_repository(
    command: Command, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs are processes of their own, which must find the same configs from any folder."""
    folder = workspace / "mine"
    (folder / "experiment").mkdir(parents=True)
    for name, seed in (("first", 3), ("second", 4)):
        (folder / f"experiment/{name}.yaml").write_text(f"# @package _global_\nseed: {seed}\n")
    (folder / "half.yaml").write_text("defaults: [train, _self_]\ntrainer: {max_steps: 20}\n")
    runs = fork_runs(workspace, monkeypatch)
    flags = ["-m", "--config-dir", "mine", "--config-name=half", "hydra.sweep.dir=else where"]
    settings = [text for text in TINY if "max_steps" not in text]
    command("train.py", *flags, *settings, "experiment=glob(*,exclude=[c*,e*,o*,small*,t*,z*])")
    homes = sorted((workspace / "else where").glob("*/*/summary.json"))
    assert [path.parent.name for path in homes] == ["first", "second"]
    assert [json.loads(path.read_text())["step"] for path in homes] == [20, 20]
    assert [yaml.safe_load((path.parent / "config.yaml").read_text())["seed"] for path in homes] == [3, 4]
    assert all(run.wait() == 0 for run in runs)


def test_a_sweep_may_be_a_dry_run(command: Command, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = fork_runs(workspace, monkeypatch)
    command("train.py", "-m", *TINY[:-1], "output=glob(hsm*,exclude=hsm_h*)", "trainer.dry_run=true")
    assert [run.wait() for run in runs] == [0, 0]
    assert all("output.classes" in run.out for run in runs)
    assert not (workspace / "runs").exists()


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
