"""Free memory of the machine, shared by its ranks, and of cgroups."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lm.system.memory
from lm.system.memory import _free_below, free_memory
from lm.system.randomness import generator_for, seed_for
from tests.conftest import ROOT


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


# ---- compiled functions ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_function_is_compiled_without_a_cache_folder(tmp_path: Path) -> None:
    source = "from lm.system.jit import compiled\n@compiled\ndef twice(number):\n    return 2 * number\n"
    (tmp_path / "module.py").write_text(source + "assert twice(21) == 42\n")
    # With this locator, numba caches only functions of zip files.
    environment = os.environ | {"NUMBA_CACHE_LOCATOR_CLASSES": "ZipCacheLocator", "PYTHONPATH": str(ROOT)}
    imports = "import module, lm.data.encode, lm.data.brown, lm.output.clusters.choice"
    subprocess.run([sys.executable, "-c", imports], env=environment, cwd=tmp_path, check=True)
    assert not list(tmp_path.rglob("*.nb*"))


# ---- randomness ------------------------------------------------------------------------------------------------------


def test_seeds_differ_by_every_argument_and_fit_a_generator() -> None:
    seeds = {
        seed_for(s, p, t) for s in range(5) for p in ("dropout layer 1", "dropout layer 11", "plan") for t in range(50)
    }
    assert len(seeds) == 5 * 3 * 50
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_draws_do_not_depend_on_history() -> None:
    first = torch.rand(4, generator=generator_for(1, "plan", 7))
    torch.rand(100)
    assert torch.equal(torch.rand(4, generator=generator_for(1, "plan", 7)), first)
    assert not torch.equal(torch.rand(4, generator=generator_for(1, "plan", 8)), first)
