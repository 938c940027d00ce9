"""Free memory of the machine, shared by its ranks, and of cgroups."""

from pathlib import Path

import pytest
import torch

import lm.system.memory
from lm.system.memory import _free_below, free_memory


def test_some_memory_is_free() -> None:
    free = free_memory(torch.device("cpu"))
    assert free is not None and 1 << 20 < free < 1 << 50


def test_ranks_of_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm.system.memory, "_free_of_machine", lambda: 8000)
    monkeypatch.setattr(lm.system.memory, "_free_of_groups", lambda: None)
    assert free_memory(torch.device("cpu")) == 8000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_memory(torch.device("cpu")) == 2000


def test_tightest_cgroup_limit_counts(tmp_path: Path) -> None:
    """A cluster job's limit may be on a parent cgroup; `max` means none."""
    limits = {"": "max", "job": "5000", "job/step": "max"}
    for name, limit in limits.items():
        group = tmp_path / name
        group.mkdir(exist_ok=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text("3000\n")
        (group / "memory.stat").write_text("anon 7\ninactive_file 1000\n")
    assert _free_below(tmp_path, "0::/job/step\n") == 3000
    assert _free_below(tmp_path, "1:name=systemd:/x\n0::/\n") is None
    assert _free_below(tmp_path, "4:memory:/old\n") is None
