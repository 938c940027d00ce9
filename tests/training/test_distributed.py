"""Training on several ranks gives the losses of one process for every output layer, and equal weights on all ranks."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lm.config.groups import plugin_names
from lm.config.schema import TrainConfig
from lm.data.corpus import open_corpus
from lm.training.metrics import read_metrics
from tests.conftest import ROOT, TINY, run_command
from tests.helpers.ranks import TRAIN, TWO_GPUS, Group, losses_alone, run_ranks, train, train_all

STEPS = 50
VARIATIONS = [
    "output=full optim.embedding=dense trainer.micro_batches=2",
    "output=sampled trainer.micro_batches=2 optim.max_grad_norm=0.05",
    "output=hsm_freq optim.weight_decay=1e-4",
    "output=hsm_sim output.num_classes=6 optim.max_grad_norm=0.05",
    "output=adaptive output.cutoffs=[10,20] trainer.micro_batches=2 optim.weight_decay=1e-4",
    "output=dsoftmax output.cutoffs=[10,20] optim.embedding=dense",
    "output=dsoftmax_star output.cutoffs=[10,20] optim.embedding=rowwise trainer.micro_batches=2",
    "output=nce output.log_z=learned trainer.micro_batches=2",
    "output=blackout optim.weight_decay=1e-4",
    "output=self_normalized",
    "output=hsm_huffman trainer.micro_batches=2 optim.max_grad_norm=0.05",
    "output=sampled optim=adam trainer.micro_batches=2 trainer.average=0.9",
    "output=full optim=adam optim.embedding=rowwise optim.schedule=cosine",
    "output=full optim=adagrad_adam optim.core_weight_decay=0.1",
    "output=full optim=sgd optim.momentum=0.9 optim.weight_decay=0.01",
    "output=full optim=rmsprop optim.warmup_steps=10",
]
"""Every output layer, optimizer and embedding update, micro-batches, and active clipping."""


@pytest.mark.parametrize(
    ("ranks", "device_type", "steps"),
    [
        (2, "cpu", 4),
        pytest.param(2, "cpu", STEPS, marks=pytest.mark.slow),
        pytest.param(4, "cpu", STEPS, marks=pytest.mark.slow),
        pytest.param(2, "cuda", STEPS, marks=TWO_GPUS),
    ],
)
def test_ranks_match_single_process(  # type: ignore[no-untyped-def]
    tiny, workspace: Path, ranks: int, device_type: str, steps: int
) -> None:
    more = ["model.dropout=0.2", "model.hidden_size=16", "trainer.batch_size=8"]
    configs: list[TrainConfig] = [tiny(*variation.split(), *more) for variation in VARIATIONS]
    assert {config.output.name for config in configs} == set(plugin_names("output")), "every layer is tried"
    open_corpus(configs[0].data)  # prepared once for all ranks
    group = Group(train_all, configs, steps, device_type, ranks=ranks, folder=workspace)
    expected = [losses_alone(config, steps, device_type) for config in configs]
    ended = group.ended()
    assert ended.codes == [0] * ranks, ended.err
    found = json.loads((workspace / "losses.json").read_text())
    for variation, ours, theirs in zip(VARIATIONS, found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, err_msg=variation)


@pytest.mark.slow
def test_bf16_compression_is_within_one_percent(tiny, workspace: Path) -> None:  # type: ignore[no-untyped-def]
    """Of the losses of 200 steps; that they differ at all shows that something was rounded."""
    settings = ["output=adaptive", "output.cutoffs=[10,20]", "model.hidden_size=64", "trainer.batch_size=8"]
    configs: list[TrainConfig] = [tiny(*settings, f"trainer.ddp_compression={kind}") for kind in ("none", "bf16")]
    open_corpus(configs[0].data)
    ended = run_ranks(train_all, configs, 200, ranks=2, folder=workspace)
    assert ended.codes == [0, 0], ended.err
    exact, rounded = json.loads((workspace / "losses.json").read_text())
    np.testing.assert_allclose(rounded, exact, rtol=0.01)
    assert rounded != exact


def torchrun(folder: Path, *arguments: str, ranks: int, options: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *launch, *arguments],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def finished(child: "subprocess.Popen[str]") -> str:
    """Return the output of a job that exited with code 0."""
    out, err = child.communicate(timeout=240)
    assert child.returncode == 0, out + err
    return out


SETTINGS = [*TINY, "model.dropout=0.2", "optim.weight_decay=1e-4", "output=adaptive", "output.cutoffs=[10,20]"]
SETTINGS += [f"trainer.{limit}" for limit in ("max_steps=120", "eval_every_steps=40", "save_every_steps=5")]
SETTINGS += ["trainer.log_every_steps=1"]


def losses(run: Path) -> list[float]:
    return [record["train/loss"] for record in read_metrics(run) if "train/loss" in record]


@pytest.fixture
def undisturbed(workspace: Path) -> list[float]:
    """Losses of an uninterrupted single-process run."""
    run_command(workspace, "train.py", *SETTINGS, "run_dir=whole")
    return losses(workspace / "whole")


def wait_until(run: Path, step: int, child: "subprocess.Popen[str]") -> None:
    while not (run / "metrics.jsonl").exists() or len(losses(run)) < step:
        assert child.poll() is None, child.communicate()
        time.sleep(0.01)


def workers_of(child: "subprocess.Popen[str]") -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(child.pid)], text=True, capture_output=True, check=True)
    return [int(line) for line in found.stdout.split()]


@pytest.mark.slow
def test_resume_with_another_world_size(workspace: Path, undisturbed: list[float]) -> None:
    run = workspace / "moved"
    for number, (ranks, steps) in enumerate([(2, 30), (1, 70), (4, 120)]):
        resume = [*SETTINGS, "run_dir=moved"] if number == 0 else ["resume=moved"]
        finished(torchrun(workspace, TRAIN, *resume, f"trainer.max_steps={steps}", ranks=ranks))
    np.testing.assert_allclose(losses(run), undisturbed, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_worker_is_replaced(workspace: Path, undisturbed: list[float], ranks: int) -> None:
    child = torchrun(workspace, TRAIN, *SETTINGS, "run_dir=run", ranks=ranks, options=("--max-restarts=3",))
    wait_until(workspace / "run", 20, child)
    os.kill(workers_of(child)[-1], signal.SIGKILL)
    finished(child)
    np.testing.assert_allclose(losses(workspace / "run"), undisturbed, rtol=1e-4)


@pytest.mark.slow
def test_replaced_worker_resumes_its_own_run(workspace: Path) -> None:
    """It resumes neither an older unfinished run with the same settings nor the checkpoint named by `resume`."""
    run_command(workspace, "train.py", *SETTINGS, "trainer.max_steps=40", "run_dir=runs/older")
    (workspace / "runs/older/summary.json").unlink()
    older = (workspace / "runs/older/metrics.jsonl").read_bytes()
    child = torchrun(workspace, TRAIN, *SETTINGS, ranks=2, options=("--max-restarts=3",))
    while not (begun := [path for path in (workspace / "runs").glob("*") if path.name != "older"]):
        time.sleep(0.01)
    wait_until(begun[0], 1, child)
    os.kill(workers_of(child)[-1], signal.SIGKILL)
    finished(child)
    assert len(losses(begun[0])) == 120
    assert (workspace / "runs/older/metrics.jsonl").read_bytes() == older

    run = workspace / "runs/older"
    first = run / "checkpoints/first.pt"
    first.write_bytes((run / "checkpoints/last.pt").read_bytes())
    again = [f"resume={first}", "trainer.max_steps=120"]
    child = torchrun(workspace, TRAIN, *again, ranks=2, options=("--max-restarts=3",))
    wait_until(run, 70, child)
    os.kill(workers_of(child)[-1], signal.SIGKILL)
    starts = [int(step) for step in re.findall(r"resumed  at step (\d+)", finished(child))]
    assert starts[0] == 40 and starts[1] >= 65


@pytest.mark.slow
def test_killed_launcher_ends_workers_and_run_resumes(workspace: Path, undisturbed: list[float]) -> None:
    child = torchrun(workspace, TRAIN, *SETTINGS, "run_dir=run", ranks=2)
    wait_until(workspace / "run", 20, child)
    workers = workers_of(child)
    child.kill()
    child.communicate()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "the workers outlive their launcher"
        time.sleep(0.05)
    finished(torchrun(workspace, TRAIN, *SETTINGS, "run_dir=run", "resume=auto", ranks=2))
    np.testing.assert_allclose(losses(workspace / "run"), undisturbed, rtol=1e-4)


def stopped_at(out: str, run: Path) -> int:
    """Return the step at which a run reports that it stopped and saved."""
    assert "Stopped and saved at step" in out
    step = int(out.split("Stopped and saved at step ")[1].split(".")[0])
    assert torch.load(run / "checkpoints" / "last.pt", weights_only=True)["progress"]["step"] == step
    return step


ENDLESS = [*SETTINGS, "trainer.max_steps=100000", "trainer.save_every_steps=null", "run_dir=run"]


@pytest.mark.slow
def test_sigterm_to_the_launcher_saves(workspace: Path) -> None:
    child = torchrun(workspace, TRAIN, *ENDLESS, ranks=2)
    wait_until(workspace / "run", 20, child)
    child.send_signal(signal.SIGTERM)
    out, _ = child.communicate(timeout=120)
    assert stopped_at(out, workspace / "run") >= 20


@pytest.mark.slow
def test_ctrl_c_pressed_twice_saves(workspace: Path) -> None:
    """A terminal signals the launcher and the ranks, and the launcher forwards its signal to the ranks."""
    child = torchrun(workspace, TRAIN, *ENDLESS, ranks=2)
    wait_until(workspace / "run", 20, child)
    os.killpg(child.pid, signal.SIGINT)
    time.sleep(0.2)
    os.killpg(child.pid, signal.SIGINT)
    out, _ = child.communicate(timeout=120)
    assert stopped_at(out, workspace / "run") >= 20


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=TWO_GPUS), pytest.param("cpu", marks=pytest.mark.slow)])
def test_two_rank_run_resumes_in_one_process(workspace: Path, device: str) -> None:
    settings = [*SETTINGS, f"trainer.device={device}"]
    run_command(workspace, "train.py", *settings, "run_dir=whole")
    ended = run_ranks(train, *settings, "run_dir=moved", "trainer.max_steps=50", ranks=2, folder=workspace)
    assert ended.codes == [0, 0], ended.err
    run_command(workspace, "train.py", "resume=moved", "trainer.max_steps=120")
    np.testing.assert_allclose(losses(workspace / "moved"), losses(workspace / "whole"), rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["trainer.batch_size=5"], "trainer.batch_size must be a multiple of the number of ranks (2); got 5"),
        (["trainer.micro_batches=3"], "trainer.micro_batches must not exceed the streams of a rank (4 / 2 = 2); got 3"),
        (["trainer.bach_size=4"], "trainer.bach_size is not a setting. Did you mean trainer.batch_size?"),
        (["resume=nowhere"], "nowhere does not exist"),
    ],
)
def test_mistake_is_reported_once(workspace: Path, settings: list[str], message: str) -> None:
    ended = run_ranks(train, *TINY, *settings, ranks=2, folder=workspace)
    assert ended.codes == [2, 2]
    assert ended.err.count(message) == 1, ended.err
    assert "Traceback" not in ended.err
    assert len(ended.err.strip().splitlines()) == 1, ended.err
    assert not list(workspace.glob("runs/*")), "a mistake leaves no run"


def train_with_own_seed() -> None:
    train(*TINY, f"seed={os.environ['RANK']}")


def test_ranks_with_different_settings_raise(workspace: Path) -> None:
    ended = run_ranks(train_with_own_seed, ranks=2, folder=workspace)
    assert ended.codes == [2, 2]
    assert ended.err.count("All ranks must be started with the same settings; these differ: seed.") == 1, ended.err


@pytest.mark.slow
def test_mistake_precedes_torchrun_report(workspace: Path) -> None:
    child = torchrun(workspace, TRAIN, *TINY, "trainer.batch_size=5", ranks=2)
    _, err = child.communicate(timeout=120)
    assert child.returncode != 0
    ours = err.split("torch/distributed/elastic")[0]
    assert ours.count("trainer.batch_size must be a multiple of the number of ranks (2); got 5") == 1, err
    assert "Traceback" not in ours
