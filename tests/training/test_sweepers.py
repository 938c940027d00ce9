"""Sweepers other than Hydra's basic one start runs through Hydra and get each run's perplexity."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from hydra.core.plugins import Plugins

from tests.conftest import TINY, Command
from tests.helpers.forks import fork_runs, launch

SWEEPER = """
import json
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

node = {"_target_": "hydra_plugins.halving.Halving", "rounds": 2}
ConfigStore.instance().store(group="hydra/sweeper", name="halving", node=node)


class Halving(Sweeper):
    \"\"\"Halves the learning rate from the upper end of its interval.\"\"\"

    def __init__(self, rounds):
        self.rounds = rounds

    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)

    def sweep(self, arguments):
        fixed = [text for text in arguments if "interval" not in text]
        found = {}
        for number in range(self.rounds):
            rate = 0.2 / 2**number
            (job,) = self.launcher.launch([[*fixed, f"optim.lr={rate}"]], initial_job_idx=number)
            found[rate] = job.return_value
        Path("found.json").write_text(json.dumps(found))
"""


@pytest.fixture
def plugins(workspace: Path) -> Path:
    """A folder for PYTHONPATH with a sweeper, found like any installed plug-in."""
    (workspace / "plugins/hydra_plugins").mkdir(parents=True)
    (workspace / "plugins/hydra_plugins/halving.py").write_text(SWEEPER)
    return workspace / "plugins"


@pytest.fixture
def halving(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweeper, registered in this process."""
    spec = importlib.util.spec_from_file_location("hydra_plugins.halving", plugins / "hydra_plugins/halving.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "hydra_plugins.halving", module)
    spec.loader.exec_module(module)
    module.Halving.__module__ = "hydra_plugins.halving"
    Plugins.instance().register(module.Halving)


def check_perplexities(workspace: Path, pattern: str) -> None:
    """Assert that the sweeper saw the best validation perplexity of its two runs."""
    seen = json.loads((workspace / "found.json").read_text())
    summaries = [json.loads((path / "summary.json").read_text()) for path in workspace.glob(pattern)]
    assert sorted(seen.values()) == sorted(summary["valid"]["best"] for summary in summaries)
    assert len(set(seen.values())) == 2


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ([], "runs/*/optim.lr-*"),
        pytest.param(["run_dir='my runs'"], "my runs/optim.lr-*", marks=pytest.mark.slow),
        pytest.param(
            ["hydra.sweep.dir=there", "hydra.sweep.subdir=x-${hydra.job.num}"], "there/x-*", marks=pytest.mark.slow
        ),
    ],
    ids=["default", "run_dir", "hydra"],
)
@pytest.mark.usefixtures("halving")
def test_sweeper_gets_the_best_perplexity_of_each_run(
    command: Command, workspace: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], pattern: str
) -> None:
    fork_runs(workspace, monkeypatch)
    command("train.py", "-m", *TINY, "hydra/sweeper=halving", "optim.lr=interval(0.01,0.2)", *settings)
    check_perplexities(workspace, pattern)


@pytest.mark.slow
def test_installed_sweeper_is_found(workspace: Path, plugins: Path) -> None:
    line = ["-m", *TINY, "hydra/sweeper=halving", "optim.lr=interval(0.01,0.2)"]
    done = launch(*line, folder=workspace, PYTHONPATH=str(plugins))
    assert done.returncode == 0, done.stderr
    check_perplexities(workspace, "runs/*/optim.lr-*")


@pytest.mark.parametrize(
    ("mistakes", "keys"),
    [
        (["seed=x", "hydra/sweeper=halvign"], ["hydra/sweeper=halving?", "seed must be"]),
        (["seed=x", "hydra/sweeper=halving"], ["seed must be"]),
        (["hydra/sweeper=halving", "hydra.sweeper.roundz=1"], ["hydra.sweeper.roundz"]),
    ],
)
@pytest.mark.usefixtures("halving")
def test_mistakes_are_found_before_any_run(
    command: Command, workspace: Path, mistakes: list[str], keys: list[str]
) -> None:
    done = command("train.py", "-m", *TINY, *mistakes, check=2)
    assert all(key in done.stderr for key in keys)
    assert not list(workspace.glob("runs/*/*"))


@pytest.mark.usefixtures("halving")
def test_failed_run_ends_a_sweep_of_another_sweeper(
    command: Command, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_runs(workspace, monkeypatch)
    settings = [text for text in TINY if text != "output=full"]
    done = command("train.py", "-m", *settings, "hydra/sweeper=halving", "output.cutoffs=[999]", check=1)
    assert "failed" in done.stderr
