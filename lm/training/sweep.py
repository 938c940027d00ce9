"""Sweeps: Hydra's sweeper chooses the runs; this launcher runs them one by one, each in its own process.

    python train.py -m output=full,adaptive seed=1,2 experiment=text8      runs/text8/output-full-seed-1, ...
    python train.py experiment=compare                                     an experiment that defines its sweep

Running one at a time keeps timings comparable, and separate processes isolate memory. A run's directory is named after
the swept settings, so repeating the command skips finished runs and resumes the others.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from lm.config.groups import LIMITS
from lm.config.schema import TrainConfig
from lm.config.validate import changed_keys, flatten, make_config, quoted, read_settings
from lm.system.console import own_command, say
from lm.system.errors import SweepError, UserError
from lm.system.interrupt import IN_SWEEP, Stopped, StopRequest

SCRIPT = Path(__file__).resolve().parents[2] / "train.py"
TRAIN = [str(SCRIPT)] if SCRIPT.exists() else ["-m", "lm.train"]
"""Python's arguments that start a run: the script in the repository, or the module when installed."""
PLUGIN_MODULE = "hydra_plugins.adaptive_lm"
"""Hydra accepts launchers only from the package hydra_plugins."""


def register_launcher() -> None:
    """Register the launcher of conf/hydra/launcher/process.yaml with Hydra."""
    plugins = Plugins.instance()  # imports the package hydra_plugins if other plug-ins are installed
    package, _, name = PLUGIN_MODULE.partition(".")
    module = sys.modules[PLUGIN_MODULE] = ModuleType(PLUGIN_MODULE)
    setattr(sys.modules.setdefault(package, ModuleType(package)), name, module)
    setattr(module, ProcessLauncher.__name__, ProcessLauncher)
    ProcessLauncher.__module__ = PLUGIN_MODULE
    plugins.register(ProcessLauncher)


@dataclass(frozen=True)
class SweepJob:
    """One run of a sweep."""

    config: TrainConfig
    overrides: list[str]
    path: Path


def finished_perplexity(path: Path, config: TrainConfig) -> float | None:
    """Return a run's best validation perplexity if it has reached the limits of these settings, else None."""
    try:
        best = json.loads((path / "summary.json").read_bytes())["valid"]["best"]
        old, new = read_settings(path), asdict(config)
        before, now = flatten(old), flatten(new)
        same_limits = all(before[f"trainer.{key}"] == now[f"trainer.{key}"] for key in (*LIMITS, "patience"))
        return float(best) if same_limits and not list(changed_keys(old, new)) else None
    except Exception:  # missing or damaged: the run itself reports what it cannot continue with
        return None


class ProcessLauncher(Launcher):
    """Hydra launcher that runs each job in its own process."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        del task_function  # each process calls its own
        self.context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        jobs = self._jobs(job_overrides, initial_job_idx)
        failures: dict[int, str] = {}
        with _Relay() as relay:
            for number, job in enumerate(jobs):
                title = f"run {initial_job_idx + number + 1} of {initial_job_idx + len(jobs)}: {job.path}"
                if finished_perplexity(job.path, job.config) is not None:
                    say(f"== {title} is finished ==")
                    continue
                say(f"== {title} ==")
                command = [*self._config_flags(), *job.overrides]
                code = relay.run([sys.executable, *TRAIN, *command])
                if relay:
                    say(f"\nStopped in {title}. The same command continues from there.")
                    raise Stopped(128 + relay.signal)
                if code:
                    failures[number] = _failure(job, code, f"{own_command('train')} {shlex.join(command)}")
                    say(f"\n{title} failed; the sweep continues.")
                say()
        error = SweepError(f"\n{len(failures)} of {len(jobs)} runs failed:\n" + "\n".join(failures.values()))
        return [
            RunReturn(job.overrides, error if number in failures else finished_perplexity(job.path, job.config))
            for number, job in enumerate(jobs)
        ]

    def _jobs(self, job_overrides: Sequence[Sequence[str]], first: int) -> list[SweepJob]:
        """Build the jobs; raises a single UserError listing all mistakes before any run starts."""
        if not job_overrides:
            raise UserError("A swept setting matches nothing, so there is nothing to run.")
        jobs, problems = [], []
        for number, overrides in enumerate(job_overrides, first):
            composed = self.context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(composed.hydra):
                composed.hydra.job.num = number
            values = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
            try:
                config = make_config(values, TrainConfig)
            except UserError as error:
                problems += str(error).splitlines()
                continue
            if config.resume not in (None, "auto"):
                raise UserError(f"resume={config.resume} names one run; a sweep resumes its runs. Leave it out.")
            path = Path(config.run_dir or composed.hydra.sweep.dir) / composed.hydra.sweep.subdir
            kept = [text for text in overrides if not text.startswith(("run_dir=", "resume=", "hydra."))]
            resume = [] if config.trainer.dry_run else ["resume=auto"]
            jobs.append(SweepJob(config, [*kept, f"run_dir={quoted(str(path))}", *resume, "hydra.mode=RUN"], path))
        if problems:
            raise UserError("\n".join(dict.fromkeys(problems)))
        paths = [job.path for job in jobs]
        if twice := next((path for path in paths if paths.count(path) > 1), None):
            raise UserError(f"Two runs of the sweep would share the directory {twice}. Start them one by one.")
        return jobs

    def _config_flags(self) -> list[str]:
        """Return the flags that tell a run's process which configs to read."""
        sources, runtime = self.config.hydra.runtime.config_sources, self.config.hydra
        flags = [f"--config-dir={source.path}" for source in sources if source.provider == "command-line"]
        given = cast("list[str]", OmegaConf.to_container(runtime.overrides.hydra, resolve=False))
        hydra_overrides = [text for text in given if text.startswith("hydra.searchpath")]
        return [*flags, f"--config-name={runtime.job.config_name}", *hydra_overrides]


class RunReturn(JobReturn):
    """A job's result that raises its error without printing it."""

    def __init__(self, overrides: Sequence[str], result: float | Exception | None) -> None:
        status = JobStatus.FAILED if isinstance(result, Exception) else JobStatus.COMPLETED
        super().__init__(overrides=overrides, status=status)
        self.result = result

    @property
    def return_value(self) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    @return_value.setter
    def return_value(self, value: Any) -> None:
        self.result = value


def _failure(job: SweepJob, code: int, command: str) -> str:
    how = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
    how += ", perhaps out of memory" if code == -signal.SIGKILL else ""
    return f"  {job.path}: {how}; its message is above. By itself:\n    {command}"


class _Relay(StopRequest):
    """Forwards Ctrl-C and SIGTERM to the current run, which saves and ends.

    Each run has its own process group, so that a terminal's Ctrl-C reaches it once, through here, not twice.
    """

    def __init__(self) -> None:
        super().__init__(second_ends=False)
        self._child: subprocess.Popen[bytes] | None = None

    def run(self, command: list[str]) -> int:
        """Run the command; return its exit code."""
        self._child = subprocess.Popen(command, process_group=0, env=os.environ | {IN_SWEEP: "1"})
        if self:  # a signal arrived before the run started
            self._child.send_signal(self.signal)
        return self._child.wait()

    def _on_signal(self, number: int, frame: object) -> None:
        super()._on_signal(number, frame)
        if self._child is not None:
            self._child.send_signal(number)
