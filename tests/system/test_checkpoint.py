"""Checkpoints: atomic writes, validation, and safety against malicious files."""

import os
import pickle
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.system import checkpoint
from lm.system.errors import UserError
from lm.training import run_writer
from lm.training.run_writer import CheckpointWriter, num_bytes
from tests.helpers.checkpoints import content
from tests.helpers.forks import Fork


def test_round_trip_and_hard_link(tmp_path: Path) -> None:
    checkpoint.save(content(1), tmp_path / "last.pt", also=tmp_path / "best.pt")
    checkpoint.save(content(2), tmp_path / "last.pt")
    assert checkpoint.load(tmp_path / "last.pt")["config"] == {"seed": 2}
    assert checkpoint.load(tmp_path / "best.pt")["config"] == {"seed": 1}
    assert torch.equal(checkpoint.load(tmp_path / "best.pt")["model"]["weight"], torch.ones(50, 40))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.pt", "last.pt"]


def test_best_is_copied_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Path) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    checkpoint.save(content(1), tmp_path / "last.pt", also=tmp_path / "best.pt")
    assert checkpoint.load(tmp_path / "best.pt")["config"] == {"seed": 1}


def test_relinking_leaves_no_partial_file(tmp_path: Path) -> None:
    checkpoint.save(content(1), tmp_path / "last.pt", also=tmp_path / "best.pt")
    checkpoint.share(tmp_path / "best.pt", tmp_path / "last.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.pt", "last.pt"]


def test_hard_link_through_symlink_outlives_both(tmp_path: Path) -> None:
    checkpoint.save(content(1), tmp_path / "mine.pt")
    (tmp_path / "link.pt").symlink_to("mine.pt")
    checkpoint.share(tmp_path / "link.pt", tmp_path / "last.pt")
    (tmp_path / "mine.pt").unlink()
    assert checkpoint.load(tmp_path / "last.pt")["config"] == {"seed": 1}


@pytest.mark.parametrize("written", [[], ["best.pt"]])
def test_crash_between_renames_keeps_whole_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[str]
) -> None:
    """The hard link is created first, so last.pt never refers to a missing best.pt."""
    checkpoint.save(content(1), tmp_path / "last.pt", also=tmp_path / "best.pt")
    put_in_place = checkpoint.put_in_place

    def interrupted(partial: Path, path: Path) -> None:
        if path.name not in written:
            raise KeyboardInterrupt
        put_in_place(partial, path)

    with monkeypatch.context() as crash, pytest.raises(KeyboardInterrupt):
        crash.setattr(checkpoint, "put_in_place", interrupted)
        checkpoint.save(content(2), tmp_path / "last.pt", also=tmp_path / "best.pt")
    seeds = {name: checkpoint.load(tmp_path / name)["config"]["seed"] for name in ("last.pt", "best.pt")}
    assert seeds == {"last.pt": 1, "best.pt": 2 if written else 1}
    checkpoint.save(content(3), tmp_path / "last.pt")  # must not write into the partial file, a link to best.pt
    assert checkpoint.load(tmp_path / "best.pt")["config"]["seed"] == seeds["best.pt"]
    assert checkpoint.load(tmp_path / "last.pt")["config"]["seed"] == 3


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    checkpoint.save(content(1), tmp_path / "last.pt")
    with pytest.raises(TypeError, match="pickle"):
        checkpoint.save({**content(2), "bad": open(os.devnull)}, tmp_path / "last.pt")  # noqa: SIM115, PTH123
    assert checkpoint.load(tmp_path / "last.pt")["config"] == {"seed": 1}


def test_full_disk_raises_and_leaves_nothing(tmp_path: Path) -> None:
    checkpoint.save(content(1), tmp_path / "last.pt")
    (tmp_path / "said").mkdir()
    child = Fork(save_to_a_full_disk, tmp_path / "last.pt", folder=tmp_path / "said")
    assert child.wait() == 0
    assert child.out.startswith("UserError: The checkpoint"), child.out + child.err
    assert "cannot be written" in child.out
    assert checkpoint.load(tmp_path / "last.pt")["config"] == {"seed": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.pt", "said"]


def save_to_a_full_disk(path: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        checkpoint.save({"model": torch.zeros(100, 100)}, path)
    except UserError as error:
        print("UserError:", error)


def test_truncated_checkpoint_raises(tmp_path: Path) -> None:
    checkpoint.save(content(), tmp_path / "last.pt")
    whole = (tmp_path / "last.pt").read_bytes()
    for length in [0, 1, 10, 100, len(whole) // 2, len(whole) - 100, len(whole) - 1]:
        (tmp_path / "cut.pt").write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"cut\.pt cannot be read as a checkpoint") as error:
            checkpoint.load(tmp_path / "cut.pt")
        assert "\n" not in str(error.value)


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch pwned",)


def test_foreign_files_raise_and_execute_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"format": 1, "config": {}, "bomb": Bomb()}, tmp_path / "bomb.pt")
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps(Bomb()))
    (tmp_path / "text.pt").write_text("hello")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"weights": torch.zeros(2)}, tmp_path / "other.pt")
    torch.save({"format": 99, "config": {}}, tmp_path / "newer.pt")
    torch.save({"format": 1, "config": {}}, tmp_path / "poor.pt")
    (tmp_path / "folder.pt").mkdir()
    for name, message in [
        ("bomb.pt", "cannot be read as a checkpoint .it holds objects"),
        ("pickle.pt", "cannot be read"),
        ("text.pt", "cannot be read"),
        ("list.pt", "not a checkpoint of this program"),
        ("other.pt", "not a checkpoint of this program"),
        ("poor.pt", "is damaged"),
        ("newer.pt", "checkpoint format 99"),
        ("folder.pt", "cannot be read: Is a directory"),
    ]:
        with pytest.raises(UserError, match=message) as error:
            checkpoint.load(tmp_path / name)
        assert "weights_only" not in str(error.value) and "\x1b" not in str(error.value)
    assert not (tmp_path / "pwned").exists()


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no checkpoints/last\.pt"):
        checkpoint.find(str(tmp_path))
    with pytest.raises(UserError, match=r"nowhere does not exist"):
        checkpoint.find(str(tmp_path / "nowhere"))
    (tmp_path / "ngram").mkdir()
    with pytest.raises(UserError, match=r"Did you mean .*/ngram\?$"):
        checkpoint.find(str(tmp_path / "ngrams"))
    with pytest.raises(UserError, match=r"is needed\.$"):
        checkpoint.find(str(tmp_path / "ngram"))


def test_shapes_are_compared_before_anything_is_allocated(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(1 << 20, 1 << 20)  # 4 TiB would not fit
    weights = {"weight": torch.zeros(2, 3), "extra": torch.zeros(1)}
    with pytest.raises(UserError) as error:
        checkpoint.check_shapes(weights, model, path=tmp_path)
    assert all(
        name in str(error.value) for name in ("weight: (2, 3)", "(1048576, 1048576)", "extra: ", "bias: missing")
    )


def test_state_with_other_structure_raises(tmp_path: Path) -> None:
    own = {"sums": {0: torch.zeros(3, 2)}, "hidden": [torch.zeros(1)]}
    checkpoint.check_state(own, {"sums": {0: torch.ones(3, 2)}, "hidden": (torch.ones(1),)}, path=tmp_path, name="x")
    for saved in [
        {"sums": {0: torch.zeros(())}, "hidden": [torch.zeros(1)]},
        {"sums": {1: torch.zeros(3, 2)}, "hidden": [torch.zeros(1)]},
        {"sums": {0: torch.zeros(3, 2)}, "hidden": []},
        {"sums": {0: 5}, "hidden": [torch.zeros(1)]},
    ]:
        with pytest.raises(UserError, match="does not fit the settings it carries"):
            checkpoint.check_state(own, saved, path=tmp_path, name="x")


def test_full_disk_promises_no_checkpoint_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for before, advice in [(False, "There is none before it"), (True, "The one before it is kept")]:
        if before:
            checkpoint.save(content(1), tmp_path / "last.pt")
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "put_in_place", fail)
            with pytest.raises(UserError, match=f"No space left on device. {advice}"):
                checkpoint.save(content(2), tmp_path / "last.pt")


# ---- writing in the background ---------------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that blocks writes until it is set."""
    opened, save = threading.Event(), checkpoint.save

    def wait_and_save(*arguments: Any, **named: Any) -> None:
        assert opened.wait(timeout=30)
        save(*arguments, **named)

    monkeypatch.setattr(checkpoint, "save", wait_and_save)
    return opened


def test_save_writes_values_at_call_time(tmp_path: Path, gate: threading.Event) -> None:
    writer, values = CheckpointWriter(), {**content(1), "hidden": [[torch.zeros(3), torch.ones(3)]]}
    writer.save(values, tmp_path / "last.pt", also=tmp_path / "best.pt")
    assert not (tmp_path / "last.pt").exists(), "save returned before anything was written"
    values["model"]["weight"].fill_(7)  # type: ignore[index]
    values["hidden"][0][0].fill_(7)  # type: ignore[index]
    gate.set()
    writer.wait()
    for name in ("last.pt", "best.pt"):
        written = checkpoint.load(tmp_path / name)
        assert torch.equal(written["model"]["weight"], torch.ones(50, 40))
        assert torch.equal(written["hidden"][0][0], torch.zeros(3))
        assert written["config"] == {"seed": 1}


def test_save_waits_for_previous_save(tmp_path: Path, gate: threading.Event) -> None:
    writer = CheckpointWriter()
    writer.save(content(1), tmp_path / "last.pt")
    second = threading.Thread(target=writer.save, args=(content(2), tmp_path / "last.pt"))
    second.start()
    second.join(timeout=0.2)
    assert second.is_alive() and len([t for t in threading.enumerate() if t.name.startswith("checkpoint")]) == 1
    gate.set()
    second.join()
    writer.wait()
    assert checkpoint.load(tmp_path / "last.pt")["config"] == {"seed": 2}


@pytest.mark.parametrize("ask", [CheckpointWriter.wait, lambda writer: writer.save(content(), Path("unused"))])
def test_write_error_is_raised_once_by_next_call(tmp_path: Path, ask: Any) -> None:
    writer = CheckpointWriter()
    writer.save(content(), tmp_path / "nowhere" / "last.pt")
    writer.close()  # does not check memory
    with pytest.raises(UserError, match=r"nowhere/last\.pt cannot be written: No such file"):
        ask(writer)
    writer.save(content(), tmp_path / "last.pt")
    writer.wait()


def test_save_is_synchronous_when_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = content()
    assert num_bytes(values) == 50 * 40 * 4
    for free, beside in [(50 * 40 * 4 * 2 - 1, False), (50 * 40 * 4 * 2, True)]:
        monkeypatch.setattr(run_writer, "free_memory", lambda _device, free=free: free)
        writer = CheckpointWriter()
        writer.save(values, tmp_path / "last.pt")
        assert (writer._pending is not None) == beside
        writer.wait()
        assert checkpoint.load(tmp_path / "last.pt")["config"] == {"seed": 1}
