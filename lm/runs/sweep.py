"""Several runs from one command line: one after the other, so that timings compare, each in its own process.

    python train.py -m output=full,adaptive seed=1,2 experiment=text8      runs/text8/full-seed-1, ...
    python train.py experiment=compare                               an experiment that defines its sweep

A run's directory is named by its settings. So the same command line, given again, skips the runs that are finished and
resumes the others. Nothing here imports torch: the memory that a run reports is its own. With `hydra/launcher=NAME` the
runs go to a cluster instead, through `lm/runs/launching.py`. Other sweepers than Hydra's basic one do without all this.
"""

import hashlib
import itertools
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.types import Override

from lm.config.command_line import BASIC, VERBATIM, CommandLine, each_value
from lm.config.commands import TrainConfig
from lm.config.groups import LIMITS
from lm.config.validate import flatten, plain_values
from lm.runs.launching import launch
from lm.runs.next_steps import next_steps
from lm.runs.reading import has_figures, read_config, read_run
from lm.runs.resume import changed_keys, may_change
from lm.system.console import python_command, say
from lm.system.errors import UserError
from lm.system.interrupt import IN_SWEEP, Stopped, StopRequest

TRAIN = Path(__file__).resolve().parents[2] / "train.py"
LONGEST_NAME = 100
"""Characters of a directory's name; file systems take about 250 bytes."""


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    config: TrainConfig
    overrides: list[str]
    path: Path

    @property
    def finished(self) -> bool:
        """Whether the directory holds a run with these settings that has reached its limits."""
        if not (self.path / "summary.json").exists():
            return False
        try:
            old, new = read_config(self.path), plain_values(self.config)
        except UserError:  # the run itself reports that it cannot continue with such settings
            return False
        before, now = flatten(old), flatten(new)
        limits = [f"trainer.{key}" for key in (*LIMITS, "patience")]
        return not list(changed_keys(old, new)) and all(before.get(key) == now[key] for key in limits)


def sweep(line: CommandLine[TrainConfig], *, compare: Callable[[list[Path]], None]) -> int:
    """Run what the command line asks for and `compare` the results; the exit code is 1 if any run failed."""
    jobs = plan(line)
    failures = run_here(jobs, line) if line.option("hydra/launcher") == BASIC else run_elsewhere(jobs, line)
    try:
        if begun := [job.path for job in jobs if has_figures(job.path)]:
            compare(begun)
            say("\n".join(next_steps(min(begun, key=_last_perplexity))))
    finally:
        if failures:
            listed = "\n".join(failures)
            print(f"\n{len(failures)} of {len(jobs)} runs failed:\n{listed}", file=sys.stderr)
    return 1 if failures else 0


def _last_perplexity(path: Path) -> float:
    """Of a run on validation; infinite where it has none, or cannot be read, as the comparison has said."""
    try:
        return read_run(path).perplexity("valid", "last") or math.inf
    except UserError:
        return math.inf


def run_here(jobs: Sequence[Job], line: CommandLine[TrainConfig]) -> list[str]:
    """Run the jobs one after the other; a line for each that failed."""
    failures = []
    with _Relay() as relay:
        for number, job in enumerate(jobs, 1):
            place = f"run {number} of {len(jobs)}: {job.path}"
            if job.finished:
                say(f"== {place} is finished ==")
                continue
            say(f"== {place} ==")
            arguments = [*line.config_flags, *job.overrides, "hydra.mode=RUN"]
            code = relay.run([sys.executable, str(TRAIN), *arguments])
            if relay:
                say(f"\nStopped in {place}. The same command continues from there.")
                raise Stopped(relay.exit_code)
            if code != 0:
                how = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
                how += ", perhaps out of memory" if code == -signal.SIGKILL else ""
                command = shlex.join([python_command(), "train.py", *arguments])
                failures.append(f"  {job.path}: {how}; its message is above. By itself:\n    {command}")
                say(f"\n{place} failed; the sweep continues.")
            say()
    return failures


def run_elsewhere(jobs: Sequence[Job], line: CommandLine[TrainConfig]) -> list[str]:
    """Run all jobs at once, by one of Hydra's launchers; a line for each that failed."""
    waiting = [job for job in jobs if not job.finished]
    if len(waiting) < len(jobs):
        say(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are finished")
    # The launcher adds the overrides of Hydra's own settings itself.
    overrides = [[text for text in job.overrides if not text.startswith("hydra")] for job in waiting]
    errors = launch(overrides, line) if waiting else []
    return [
        f"  {job.path}: {error or 'it has not reached its limits'}"
        for job, error in zip(waiting, errors, strict=True)
        if error or not (job.finished or job.config.trainer.dry_run)
    ]


def plan(line: CommandLine[TrainConfig]) -> list[Job]:
    """One job per combination of the swept values; of a setting that is given twice the last counts, as in Hydra."""
    hydra = line.composed.hydra
    carried = [f"{key}={value}" for key, value in (hydra.sweeper.params or {}).items()]
    groups = set(hydra.runtime.choices)
    parsed = {override.get_key_element(): override for override in line.parse([*carried, *line.overrides])}
    with line.all_mistakes():
        combinations = list(dict.fromkeys(itertools.product(*map(each_value, parsed.values()))))
        configs = [line.variant(chosen) for chosen in combinations]
    if (resume := configs[0].resume) not in (None, "auto"):
        raise UserError(f"resume={resume} names one run; a sweep resumes its runs by itself. Leave it out.")
    home = configs[0].run_dir or Path(hydra.sweep.dir) / _folder_name(parsed, configs, groups)
    swept = [override.is_sweep_override() for override in parsed.values()]
    jobs = []
    for chosen, config in zip(combinations, configs, strict=True):
        labels = [_label(text, groups) for text, is_swept in zip(chosen, swept, strict=True) if is_swept]
        path = Path(home) / _short("-".join(labels) or config.output.name)
        kept = [line.as_typed.get(text, text) for text in chosen if not text.startswith(("run_dir=", "resume="))]
        resumed = [] if config.trainer.dry_run else ["resume=auto"]
        jobs.append(Job(config, [*kept, f"run_dir={path}", *resumed], path))
    paths = [job.path for job in jobs]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise UserError(f"Two runs of the sweep would share the directory {twice}. Start them one by one.")
    return jobs


def _folder_name(parsed: dict[str, Override], configs: Sequence[TrainConfig], groups: set[str]) -> str:
    """What all runs of the sweep share: the experiment or the corpus, then the settings that were given.

    Limits, logging and device are left out: they may change when the same runs are resumed. Limits that the learning
    rate depends on may not.
    """
    fixed = {key: str(override.input_line) for key, override in parsed.items() if not override.is_sweep_override()}
    if "experiment" in fixed:
        first = fixed.pop("experiment").partition("=")[2]
    else:
        first = "sweep" if (parsed.keys() - fixed.keys()) & {"experiment", "data"} else configs[0].data.name
        fixed.pop("data", None)
    fixing = {f"trainer.{key}" for config in configs for key in config.optim.schedule.counted_from}
    free = {*may_change(TrainConfig), "hydra"} - fixing
    rest = [_label(text, groups) for key, text in fixed.items() if not free & {key, re.split(r"[./]", key)[0]}]
    return _short("-".join([first, *rest]))


def _label(text: str, groups: set[str]) -> str:
    """`output=full` becomes full, `optim.lr=0.1` lr-0.1, a path its last part; only characters safe in any shell."""
    key, _, value = text.lstrip("+~").partition("=")
    if key in VERBATIM:
        value = value.rstrip("/'").rpartition("/")[2]
    parts = [value] if key in groups else [key.rpartition(".")[2], value]
    return "-".join(re.sub(r"[^\w.+-]+", "-", part).strip("-") for part in parts)


def _short(name: str) -> str:
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


class _Relay(StopRequest):
    """While entered, passes Ctrl-C and SIGTERM on to the current run, which saves and ends.

    Each run has its own process group, so that a terminal's Ctrl-C reaches it once, through here, not twice.
    """

    def __init__(self) -> None:
        super().__init__(second_ends=False)
        self._child: subprocess.Popen[bytes] | None = None

    def run(self, command: list[str]) -> int:
        """Start the command and wait for it; its exit code."""
        self._child = subprocess.Popen(command, process_group=0, env=os.environ | {IN_SWEEP: "1"})
        if self:  # the signal came just before
            self._child.send_signal(self.pending())
        return self._child.wait()

    def _note(self, number: int, frame: object) -> None:
        super()._note(number, frame)
        if self._child is not None:
            self._child.send_signal(number)
