"""Sweepers other than Hydra's basic one: they start the runs through Hydra and see the perplexity of each."""

import json
from pathlib import Path

import pytest

from lm.config.command_line import CommandLine
from lm.config.commands import TrainConfig
from tests.conftest import TINY
from tests.runs.test_sweep import launch

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
        ([], "runs/sweep-*"),
        pytest.param(["run_dir=my runs"], "my runs", marks=pytest.mark.slow),
        pytest.param(
            ["hydra.sweep.dir=there", "hydra.sweep.subdir=x/${hydra.job.num}"], "there/x", marks=pytest.mark.slow
        ),
    ],
    ids=["default", "run_dir", "hydra"],
)
def test_a_sweeper_sees_the_best_validation_perplexity_of_each_run(
    workspace: Path, plugins: str, settings: list[str], pattern: str
) -> None:
    line = ["-m", *TINY, "hydra/sweeper=halving", "optim.lr=interval(0.01,0.2)", *settings]
    done = launch(*line, folder=workspace, PYTHONPATH=plugins)
    assert done.returncode == 0, done.stderr
    found = json.loads((workspace / "found.json").read_text())
    (home,) = workspace.glob(pattern)
    assert sorted(path.name for path in home.iterdir()) == ["0", "1"], "each run has its own directory"
    summaries = [json.loads((home / name / "summary.json").read_text()) for name in ("0", "1")]
    assert list(found.values()) == [summary["valid"]["best"] for summary in summaries]
    assert len(set(found.values())) == 2


@pytest.mark.parametrize(
    ("mistakes", "messages"),
    [
        (
            ["optim.lr=interval(-1,1)", "seed=x", "hydra/sweeper=halvign"],
            [
                "hydra/sweeper=halvign does not exist. Did you mean hydra/sweeper=halving?",
                "optim.lr must be a number, above 0",
                "seed must be a whole number",
            ],
        ),
        (["hydra.sweeper.roundz=1"], ["Could not override 'hydra.sweeper.roundz'."]),
    ],
)
def test_mistakes_are_found_before_any_run(
    workspace: Path, plugins: str, mistakes: list[str], messages: list[str]
) -> None:
    done = launch("-m", *TINY, "hydra/sweeper=halving", *mistakes, folder=workspace, PYTHONPATH=plugins)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert len(lines) == len(messages)
    assert all(line.startswith(message) for line, message in zip(lines, messages, strict=True))
    assert not (workspace / "runs").exists()


@pytest.mark.slow
def test_a_run_that_fails_ends_such_a_sweep_without_a_traceback(workspace: Path, plugins: str) -> None:
    settings = [text for text in TINY if text != "output=full"]
    done = launch(
        "-m", *settings, "hydra/sweeper=halving", "output.cutoffs=[999]", folder=workspace, PYTHONPATH=plugins
    )
    assert done.returncode == 2
    assert "output.cutoffs must increase" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_basic_sweeper_stays_ours() -> None:
    assert CommandLine(["-m", "seed=1,2"], name="train", schema=TrainConfig).option("hydra/sweeper") == "basic"
