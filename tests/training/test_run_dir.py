"""Run directories: readable names, one writer at a time, nothing overwritten, the right run resumed."""

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml  # type: ignore[import-untyped]

from lm.cli import compose_config
from lm.config.schema import TrainConfig
from lm.config.validate import changed_keys, flatten
from lm.system.console import Progress, say, transcript
from lm.system.errors import UserError
from lm.system.ranks import Ranks
from lm.training.run_dir import RunDir, Start, open_run_dir, resolve
from lm.training.run_dir import _create as create
from tests.conftest import TINY, Command, Tiny


@pytest.fixture(autouse=True)
def in_workspace(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace)


def test_remains_of_a_run_are_not_overwritten(tiny: Tiny, workspace: Path) -> None:
    """Without its last checkpoint a run can neither be resumed nor restarted in the same place."""
    path = make_run(workspace / "run", tiny())
    (path / "checkpoints" / "last.pt").rename(path / "checkpoints" / "best.pt")
    with pytest.raises(UserError, match=r"without checkpoints/last.pt, .* Try resume=\S+/best.pt, or another run_dir"):
        resolve(tiny("resume=auto"))
    (path / "config.yaml").unlink()
    with pytest.raises(UserError, match="already holds a run"):
        create(tiny(), path)
    (path / "checkpoints" / "best.pt").unlink()
    (path / "summary.json").touch()
    with pytest.raises(UserError, match=r"without checkpoints/last.pt, .* Try another run_dir"):
        resolve(tiny("resume=auto"))


def make_run(path: Path, config: TrainConfig, *, finished: bool = False) -> Path:
    run = RunDir(path)
    run.write_settings(asdict(config))
    run.last.write_bytes(b"x")
    if finished:
        (path / "summary.json").write_text("{}")
    run.close()
    return path


def found(config: TrainConfig) -> tuple[Path | None, Path | None, bool]:
    start = resolve(config)
    return start.path, start.checkpoint, start.is_trusted


@pytest.mark.parametrize("resume", ["auto", "run"])
@pytest.mark.parametrize("in_place", [False, True], ids=["new inode", "reused inode"])
def test_run_continued_by_another_process_raises(tiny: Tiny, workspace: Path, resume: str, *, in_place: bool) -> None:
    path = make_run(workspace / "run", tiny())
    last = path / "checkpoints/last.pt"
    start = resolve(tiny(f"resume={resume}", f"run_dir={path}"))
    with last.open("rb") as file:  # still open: its inode is not reused
        time.sleep(0.02)  # longer than the steps of a file system's clock
        (last if in_place else path / "new.pt").write_bytes(b"y")
        if not in_place:
            (path / "new.pt").rename(last)
        assert (os.fstat(file.fileno()).st_ino == last.stat().st_ino) == in_place
        opened = open_run_dir(start, tiny(), overrides=[], device=torch.device("cpu"), ranks=Ranks())
        with pytest.raises(UserError, match="was resumed by another process"), opened:
            pytest.fail("opened")
    RunDir(path).close()  # not locked any longer


def test_run_names_are_unique(tiny: Tiny) -> None:
    config = tiny("run_dir=null")
    assert resolve(config) == Start(None)
    runs = [create(config, None) for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    assert runs[0].path.parent == Path("runs")
    assert runs[0].path.name.startswith("zipf-full-20")
    assert not set(runs[0].path.name) & set("=, ")


def test_run_is_never_overwritten(tiny: Tiny, workspace: Path) -> None:
    make_run(workspace / "run", tiny())
    path = workspace / "run"
    assert resolve(tiny()) == Start(path)
    with pytest.raises(UserError, match=r"already holds a run, which is never overwritten. Try resume=auto"):
        create(tiny(), path)


def test_unreadable_runs_are_skipped(tiny: Tiny) -> None:
    make_run(Path("runs/broken"), tiny())
    Path("runs/broken/config.yaml").write_text("a: [")
    assert resolve(tiny("resume=auto", "run_dir=null")) == Start(None)


def test_second_writer_raises_and_names_the_first(workspace: Path) -> None:
    first = RunDir(workspace / "run")
    with pytest.raises(UserError, match=rf"is being written by process {os.getpid()} on "):
        RunDir(workspace / "run")
    first.close()
    RunDir(workspace / "run").close()


def test_auto_continues_run_dir_or_newest_matching_run(tiny: Tiny, workspace: Path) -> None:
    assert resolve(tiny("resume=auto")) == Start(workspace / "run")
    make_run(workspace / "run", tiny())
    assert found(tiny("resume=auto")) == (workspace / "run", workspace / "run/checkpoints/last.pt", True)

    anywhere = tiny("resume=auto", "run_dir=null")
    assert resolve(anywhere) == Start(None)
    make_run(Path("runs/old"), tiny())
    time.sleep(0.02)
    make_run(Path("runs/new"), tiny("trainer.max_steps=77", "trainer.log_every_steps=3"))  # limits may differ
    time.sleep(0.02)
    make_run(Path("runs/other"), tiny("optim.lr=0.2"))
    make_run(Path("runs/done"), tiny(), finished=True)
    assert found(anywhere) == (Path("runs/new"), Path("runs/new/checkpoints/last.pt"), True)


def test_resume_path_continues_in_place(tiny: Tiny, workspace: Path) -> None:
    path = make_run(workspace / "there", tiny())
    last = path / "checkpoints" / "last.pt"
    assert found(tiny("run_dir=null", f"resume={path}")) == (path, last, False)
    assert found(tiny("run_dir=null", f"resume={last}")) == (path, last, False)
    with pytest.raises(UserError, match="continues inside its own run directory"):
        resolve(tiny(f"resume={path}"))
    with pytest.raises(UserError, match="does not exist"):
        resolve(tiny("run_dir=null", "resume=/no/where"))


def test_missing_setting_of_older_run_has_default(tiny: Tiny) -> None:
    old = asdict(tiny())
    del old["optim"]["warmup_steps"], old["optim"]["accumulator_start"]
    assert list(changed_keys(old, asdict(tiny()))) == []
    new = asdict(tiny("optim.warmup_steps=5"))
    assert list(changed_keys(old, new)) == [("optim.warmup_steps", 0, 5)]


@pytest.mark.parametrize(
    ("schedule", "fixed"),
    [("constant", ""), ("linear", "epochs steps"), ("cosine", "epochs steps"), ("halve_after_half", "epochs")],
)
def test_schedule_fixes_limits(tiny: Tiny, schedule: str, fixed: str) -> None:
    settings = [f"optim.schedule={schedule}", "trainer.max_epochs=4"]
    new = asdict(tiny(*settings, "trainer.max_epochs=8", "trainer.max_steps=80"))
    changed = [key for key, _, _ in changed_keys(asdict(tiny(*settings)), new)]
    assert changed == [f"trainer.max_{limit}" for limit in fixed.split()]


def test_run_dir_stores_overrides_and_output(command: Command, workspace: Path) -> None:
    run = workspace / "run"
    typed = [*TINY, "run_dir=run", "output.cost_model='it is, (now)'"]
    typed[typed.index("output=full")] = "output.cutoffs=[9]"
    first = command("train.py", *typed)
    log = (run / "run.log").read_text()
    assert log.startswith("corpus ")
    assert first.stdout.endswith(log), "exactly what was printed, from the opening on"
    assert yaml.safe_load((run / "overrides.yaml").read_text()) == typed
    config = asdict(compose_config(typed, name="train", schema=TrainConfig))
    assert flatten(config) == flatten(yaml.safe_load((run / "config.yaml").read_text()))

    second = command("train.py", "resume=run", "trainer.max_steps=45")
    again = (run / "run.log").read_text()
    assert again.startswith(log)
    assert second.stdout.endswith(again.removeprefix(log))
    assert "resumed  at step 40" in again
    assert yaml.safe_load((run / "overrides.yaml").read_text()) == [*typed, "resume=run", "trainer.max_steps=45"]


def test_progress_does_not_reach_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with transcript(tmp_path / "run.log"):
        say("kept")
        with Progress(2, label="train", unit="steps") as progress:
            progress.line()
        say("an answer elsewhere", to=sys.stderr)
    say("too late")
    assert (tmp_path / "run.log").read_text() == "kept\n"
    assert "train 0/2 steps" in capsys.readouterr().out
