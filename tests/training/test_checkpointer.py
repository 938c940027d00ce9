"""Background checkpoints: a snapshot at the time of saving, one write at a time, and errors are raised."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.system import checkpoint
from lm.system.errors import UserError
from lm.training import checkpointer
from lm.training.checkpointer import CheckpointWriter, num_bytes
from tests.helpers.checkpoints import content


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
    assert second.is_alive() and len([t for t in threading.enumerate() if t.name == "checkpoint"]) == 1
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
        monkeypatch.setattr(checkpointer, "free_memory", lambda _device, free=free: free)
        writer = CheckpointWriter()
        writer.save(values, tmp_path / "last.pt")
        assert (writer._thread is not None) == beside
        writer.wait()
        assert checkpoint.load(tmp_path / "last.pt")["config"] == {"seed": 1}
