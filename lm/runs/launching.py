"""The runs of a sweep, handed to one of Hydra's launchers instead of being run here one after the other.

    python train.py -m hydra/launcher=slurm hydra.launcher.partition=NAME seed=1,2

Which runs there are, and in which directories, stays with `sweep.py`, in place of Hydra's own sweeper. A launcher is
a plugin: it gets the settings of each run, starts a process for it somewhere, and waits for all of them.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from hydra._internal.callbacks import Callbacks
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from lm.config.command_line import composer, quote_verbatim
from lm.config.commands import TrainConfig
from lm.config.validate import make_config
from lm.system.console import say
from lm.system.errors import UserError
from lm.system.interrupt import Stopped

BASIC = "basic"
"""Hydra's own launcher, whose part `sweep.py` plays itself."""


def launcher_of(overrides: Sequence[str]) -> str:
    """The name of the chosen launcher."""
    with composer() as loader:
        return _name(_composed(loader, overrides))


def launch(runs: Sequence[Sequence[str]], *, overrides: Sequence[str]) -> list[str | None]:
    """Start all runs, each given by its settings, and wait for them; what went wrong with each, or None.

    `overrides` are those of the sweep: they choose the launcher and set its options.
    """
    with composer() as loader:
        config = _composed(loader, overrides)
        launcher = _make(config, loader)
        say(f"{len(runs)} runs go to hydra/launcher={_name(config)}; waiting for them")
        settings = [[quote_verbatim(text) for text in run if not text.startswith("hydra")] for run in runs]
        try:
            results = launcher.launch(settings, initial_job_idx=0)
        except Exception as error:  # a plugin may raise anything, and does so for all of its jobs at once
            output = config.hydra.launcher.get("submitit_folder")
            where = f"; what the jobs said is in {Path(output).parent}" if output else ""
            return [f"{_first_line(error)}{where}"] * len(runs)
    return [_told(result) for result in results]


def _composed(loader: Any, overrides: Sequence[str]) -> DictConfig:
    mode = RunMode.MULTIRUN
    composed = loader.load_configuration("train", list(overrides), run_mode=mode, validate_sweep_overrides=False)
    return cast(DictConfig, composed)


def _name(config: DictConfig) -> str:
    return str(config.hydra.runtime.choices["hydra/launcher"])


def _make(config: DictConfig, loader: Any) -> Launcher:
    context = HydraContext(config_loader=loader, callbacks=Callbacks())
    try:
        return Plugins.instance().instantiate_launcher(context, run_one, config)
    except (ImportError, RuntimeError):
        raise UserError(
            f"hydra/launcher={_name(config)} needs a plugin that is not installed. Try python -m pip install -c "
            "constraints.txt -e '.[slurm]', or leave it out: the runs then go one after the other on this machine"
        ) from None


def _told(result: JobReturn) -> str | None:
    raised = result._return_value  # asked for by its public name, it is raised again and told twice
    return _first_line(raised) if isinstance(raised, Exception) else None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(" :") or type(error).__name__


# ---- in the launcher's processes ---------------------------------------------------------------------------------


def run_one(values: DictConfig) -> None:
    """One run, in the process that a launcher has started for it; in each of them, if there are several."""
    from lm.runs.run import train

    _be_one_of_the_ranks()
    try:
        train(make_config(values, TrainConfig), overrides=list(HydraConfig.get().overrides.task))
    except Stopped:
        raise UserError("It was asked to stop, and has saved; the same command goes on from there.") from None


def _be_one_of_the_ranks() -> None:
    """What torchrun says to the processes of a run, where submitit has started them."""
    with suppress(ImportError, RuntimeError):  # another launcher's process
        from submitit.helpers import TorchDistributedEnvironment

        ranks = TorchDistributedEnvironment()
        if ranks.world_size > 1:
            ranks.export(set_cuda_visible_devices=False)
