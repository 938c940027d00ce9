"""Failures with several ranks are reported once in one paragraph, leave no partial file and no waiting rank."""

import errno
import os
import signal
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.system import checkpoint
from lm.system.errors import UserError
from tests.conftest import TINY, run_command
from tests.helpers.ranks import Group, run_ranks, train

SAVING = [*TINY, "trainer.max_steps=60", "trainer.save_every_steps=5", "run_dir=run"]


def is_rank0() -> bool:
    return os.environ["RANK"] == "0"


def one_paragraph(text: str) -> str:
    assert "Traceback" not in text
    (line,) = text.strip().splitlines()
    return line


def saved_step(folder: Path) -> int:
    """Return the last checkpoint's step; it must be complete, with no leftovers."""
    files = {path.name for path in (folder / "run/checkpoints").iterdir()}
    assert files <= {"last.pt", "best.pt"}, files
    return int(checkpoint.load(folder / "run/checkpoints/last.pt")["progress"]["step"])


def train_and_do_at_save(number: int, act: Any, *, on_first: bool) -> None:
    """Train; rank 0 (or the others) calls `act(trainer)` before the `number`-th save."""
    from lm.training.run_writer import RunWriter

    save, calls = RunWriter.save, [0]

    def disturbed(self: RunWriter, *, best: bool = False) -> None:
        calls[0] += 1
        if calls[0] == number and is_rank0() == on_first:
            act(self.trainer)
        save(self, best=best)

    RunWriter.save = disturbed  # type: ignore[method-assign]
    train(*SAVING)


def die_while_the_first_writes(trainer: Any) -> None:
    trainer.state_dict()  # the collective part of a save
    os.kill(os.getpid(), signal.SIGKILL)


def fill_the_disk(trainer: Any) -> None:  # noqa: ARG001
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoint.write_beside = full  # type: ignore[attr-defined, assignment]


def fail_alone(trainer: Any) -> None:  # noqa: ARG001
    raise UserError("Out of memory on this one.")


def dying_rank() -> None:
    train_and_do_at_save(4, die_while_the_first_writes, on_first=False)


def full_disk() -> None:
    train_and_do_at_save(4, fill_the_disk, on_first=True)


def lone_mistake() -> None:
    train_and_do_at_save(4, fail_alone, on_first=False)


def test_rank_dying_during_save_leaves_whole_checkpoint(workspace: Path) -> None:
    ended = run_ranks(dying_rank, ranks=2, folder=workspace)
    assert ended.codes == [2, -signal.SIGKILL]
    assert "Rank 0 has lost another of the 2 ranks" in one_paragraph(ended.err)
    assert "torchrun --max-restarts=3" in ended.err
    assert saved_step(workspace) == 15


def test_full_disk_is_reported_once_and_keeps_old_checkpoint(workspace: Path) -> None:
    ended = run_ranks(full_disk, ranks=2, folder=workspace)
    assert ended.codes == [2, 2]
    assert "last.pt cannot be written: No space left on device" in one_paragraph(ended.err)
    assert saved_step(workspace) == 10


def stop_another() -> None:
    """Like `train`, but only rank 1 gets the stop signal."""
    train_and_do_at_save(3, lambda *_: os.kill(os.getpid(), signal.SIGTERM), on_first=False)


def stop_another_on_a_full_disk() -> None:
    """Rank 0 can write one more checkpoint, but not the one saved when rank 1 is stopped."""
    write, writes = checkpoint.write_beside, [0]

    def fills_up(path: Path, content: Any) -> Path:
        writes[0] += 1
        if writes[0] > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content)

    checkpoint.write_beside = fills_up  # type: ignore[attr-defined]
    stop_another()


@pytest.mark.slow
def test_stop_of_another_rank_is_reported_after_saving(workspace: Path) -> None:
    ended = run_ranks(stop_another, ranks=2, folder=workspace)
    assert ended.codes == [143, 143], ended.err
    step = saved_step(workspace)
    assert 10 < step < 15, "saved immediately, not at the next scheduled save"
    assert f"Stopped and saved at step {step}." in ended.out


def test_stop_with_failed_save_is_not_reported_as_saved(workspace: Path) -> None:
    ended = run_ranks(stop_another_on_a_full_disk, ranks=2, folder=workspace)
    assert ended.codes[0] == 2
    assert "No space left on device" in ended.err
    assert "Stopped and saved" not in ended.out
    assert saved_step(workspace) == 10


def test_error_on_one_rank_is_printed_there(workspace: Path) -> None:
    ended = run_ranks(lone_mistake, ranks=2, folder=workspace)
    assert ended.codes == [2, 2]
    lost, alone = sorted(ended.err.strip().splitlines(), reverse=True)
    assert alone == "Out of memory on this one."
    assert lost.startswith("Rank 0 has lost another of the 2 ranks")


def impatient() -> None:
    """Like `train`, but rank 1 stops responding, and the timeout is short."""
    import lm.system.ranks

    lm.system.ranks.TIMEOUT = timedelta(seconds=3)
    train_and_do_at_save(3, lambda *_: os.kill(os.getpid(), signal.SIGSTOP), on_first=False)


@pytest.mark.slow
def test_silent_rank_times_out(workspace: Path) -> None:
    group = Group(impatient, ranks=2, folder=workspace)
    group.processes[0].join(60)
    assert group.processes[1].is_alive()
    group.processes[1].kill()  # as torchrun does
    ended = group.ended()
    assert ended.codes[0] == 2
    assert "Rank 0 has lost another of the 2 ranks" in one_paragraph(ended.err)
    assert saved_step(workspace) == 5


@pytest.mark.slow
def test_score_unchanged_with_fewer_chunks_than_ranks(workspace: Path) -> None:
    settings = [*TINY, "output=sampled", "evaluate.streams=3", "trainer.max_steps=20", "trainer.eval_every_steps=10"]
    run_command(workspace, "train.py", *settings, "run_dir=alone")
    ended = run_ranks(train, *settings, "run_dir=run", ranks=4, folder=workspace)
    assert ended.codes == [0] * 4, ended.err
    assert "ranks    4, each with 1 of the 4 streams" in ended.out.splitlines()
    figures = []
    for run in ("alone", "run"):
        progress = checkpoint.load(workspace / run / "checkpoints/last.pt")["progress"]
        figures.append([progress["last_perplexity"], progress["best_perplexity"], progress["best_step"]])
    assert figures[1] == pytest.approx(figures[0], rel=1e-4)


def test_checkpoint_streams_must_divide_by_world_size(workspace: Path) -> None:
    run_command(workspace, "train.py", *TINY, "run_dir=run")
    before = (workspace / "run/checkpoints/last.pt").stat().st_mtime_ns
    ended = run_ranks(train, "resume=run", "trainer.max_steps=60", ranks=3, folder=workspace)
    assert ended.codes == [2, 2, 2]
    error = one_paragraph(ended.err)
    assert "trainer.batch_size must be a multiple of the number of ranks (3); got 4" in error
    assert "or 2 rank(s) for a resumed run" in error
    assert (workspace / "run/checkpoints/last.pt").stat().st_mtime_ns == before


@pytest.mark.slow
def test_run_dir_in_use_raises(workspace: Path) -> None:
    from lm.training.run_dir import RunDir

    held = RunDir(workspace / "run")
    ended = run_ranks(train, *TINY, "run_dir=run", ranks=2, folder=workspace)
    held.close()
    assert ended.codes == [2, 2]
    assert f"run_dir=run is being written by process {os.getpid()}" in one_paragraph(ended.err)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set without RANK, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "1"}, "RANK must be below WORLD_SIZE; got 1 and 1"),
    ],
)
def test_partial_torchrun_environment_raises(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    error = one_paragraph(run_command(workspace, "train.py", *TINY, check=2).stderr)
    assert error == f"{message}. torchrun sets all of these variables. Try torchrun train.py ..., or unset them."


@pytest.mark.parametrize("value", ["", "two", "-1"])
def test_rank_that_is_no_number_raises(workspace: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", value)
    error = one_paragraph(run_command(workspace, "train.py", *TINY, check=2).stderr)
    assert error == f"WORLD_SIZE={value!r} must be a whole number. torchrun sets it. Unset it for one process."


def test_port_in_use_raises(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for key, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(key, value)
        error = one_paragraph(run_command(workspace, "train.py", *TINY, check=2).stderr)
    assert f"The 2 ranks could not connect at 127.0.0.1:{port}" in error


@pytest.mark.slow
def test_bf16_and_profiling_work_with_ranks(workspace: Path) -> None:
    settings = ["trainer.precision=bf16", "trainer.profile=true", "output=adaptive", "output.cutoffs=[10,20]"]
    ended = run_ranks(train, *TINY, *settings, "trainer.micro_batches=2", "run_dir=run", ranks=2, folder=workspace)
    assert ended.codes == [0, 0], ended.err
    assert (workspace / "run/steps.pt.trace.json").exists()
    assert torch.isfinite(torch.tensor(checkpoint.load(workspace / "run/checkpoints/last.pt")["loss_sum"].item()))
