"""The runs of a sweep, handed to one of Hydra's launchers instead of running here one after the other.

    python train.py -m hydra/launcher=slurm hydra.launcher.partition=NAME seed=1,2

`sweep.py` decides which runs there are and where they write, in place of Hydra's own sweeper. A launcher is a plugin:
it receives the settings of each run, starts a process for it somewhere, and waits for all of them.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hydra._internal.callbacks import Callbacks
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import HydraContext
from omegaconf import DictConfig

from lm.config.command_line import CommandLine, quote_verbatim
from lm.config.commands import TrainConfig
from lm.config.validate import make_config
from lm.system.console import counted, say
from lm.system.errors import UserError
from lm.system.interrupt import Stopped


def launch(runs: Sequence[Sequence[str]], line: CommandLine[TrainConfig]) -> list[str | None]:
    """Start all runs, each given by its overrides, and wait for them; the error of each, or None."""
    name, config = line.option("hydra/launcher"), line.composed
    context = HydraContext(config_loader=line.loader, callbacks=Callbacks())
    try:
        launcher = Plugins.instance().instantiate_launcher(context, run_one, config)
    except (ImportError, RuntimeError):
        raise UserError(
            f"hydra/launcher={name} needs a plugin that is not installed. Try python -m pip install -c "
            "constraints.txt -e '.[slurm]', or leave it out: the runs then go one after the other on this machine"
        ) from None
    say(f"{counted(len(runs), 'run')} handed to hydra/launcher={name}; waiting")
    try:
        results = launcher.launch([[quote_verbatim(text) for text in run] for run in runs], initial_job_idx=0)
    except Exception as error:  # a plugin may raise anything, and does so for all of its jobs at once
        output = config.hydra.launcher.get("submitit_folder")
        return [_first_line(error) + (f"; the jobs' output is in {Path(output).parent}" if output else "")] * len(runs)
    returned = [result._return_value for result in results]  # the public `return_value` would raise a job's error
    return [_first_line(value) if isinstance(value, Exception) else None for value in returned]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(" :") or type(error).__name__


def run_one(values: DictConfig) -> float | None:
    """One run, in the process that a launcher has started for it; in each of them, if there are several."""
    from lm.runs.run import train

    with suppress(ImportError, RuntimeError):  # not a process of submitit's
        from submitit.helpers import TorchDistributedEnvironment

        ranks = TorchDistributedEnvironment()
        if ranks.world_size > 1:
            ranks.export(set_cuda_visible_devices=False)  # the variables that torchrun sets
    try:
        return train(make_config(values, TrainConfig), overrides=list(HydraConfig.get().overrides.task))
    except Stopped:
        raise UserError("It was asked to stop, and has saved; the same command continues it.") from None
