"""Sweepers other than Hydra's basic one: they start the runs through Hydra and see the perplexity of each."""

import json
from pathlib import Path

import pytest

from tests.conftest import TINY
from tests.helpers.forks import launch

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
def plugins(workspace: Path) -> str:
    """A folder for PYTHONPATH with a sweeper of our own, found as any installed plugin is."""
    (workspace / "plugins/hydra_plugins").mkdir(parents=True)
    (workspace / "plugins/hydra_plugins/halving.py").write_text(SWEEPER)
    return str(workspace / "plugins")


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
def test_sweeper_gets_the_best_validation_perplexity_of_each_run(
    workspace: Path, plugins: str, settings: list[str], pattern: str
) -> None:
    line = ["-m", *TINY, "hydra/sweeper=halving", "optim.lr=interval(0.01,0.2)", *settings]
    done = launch(*line, folder=workspace, PYTHONPATH=plugins)
    assert done.returncode == 0, done.stderr
    found = json.loads((workspace / "found.json").read_text())
    summaries = [json.loads((path / "summary.json").read_text()) for path in workspace.glob(pattern)]
    assert sorted(found.values()) == sorted(summary["valid"]["best"] for summary in summaries)
    assert len(set(found.values())) == 2


@pytest.mark.parametrize(
    ("mistakes", "keys"),
    [
        (["seed=x", "hydra/sweeper=halvign"], ["hydra/sweeper=halving?", "seed must be"]),
        (["seed=x", "hydra/sweeper=halving"], ["seed must be"]),
        (["hydra/sweeper=halving", "hydra.sweeper.roundz=1"], ["hydra.sweeper.roundz"]),
    ],
)
def test_mistakes_are_found_before_any_run(workspace: Path, plugins: str, mistakes: list[str], keys: list[str]) -> None:
    done = launch("-m", *TINY, *mistakes, folder=workspace, PYTHONPATH=plugins)
    assert done.returncode == 2
    assert all(key in done.stderr for key in keys)
    assert "Traceback" not in done.stderr
    assert not list(workspace.glob("runs/*/*"))


@pytest.mark.slow
def test_a_run_that_fails_ends_such_a_sweep_without_a_traceback(workspace: Path, plugins: str) -> None:
    settings = [text for text in TINY if text != "output=full"]
    done = launch(
        "-m", *settings, "hydra/sweeper=halving", "output.cutoffs=[999]", folder=workspace, PYTHONPATH=plugins
    )
    assert done.returncode == 1
    assert "output.cutoffs must increase" in done.stderr
    assert "Traceback" not in done.stderr
