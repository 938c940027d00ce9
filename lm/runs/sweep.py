"""Several runs from one command line: one after the other, for honest timing, each in a process of its own.

    python train.py -m output=full,adaptive seed=1,2 experiment=text8      runs/text8/full-seed-1, ...
    python train.py experiment=compare_small                               an experiment that carries its sweep

A run's directory is named by its settings. So the same command line, given again, skips the runs that are finished and
resumes the others. Nothing here imports torch: the memory that a run reports is its own. With `hydra/launcher=NAME` the
runs go to a cluster instead, through `lm/runs/launching.py`.
"""

import hashlib
import itertools
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from lm.config.command_line import ONE_RUN, VERBATIM, composer, each_value
from lm.config.commands import TrainConfig
from lm.config.validate import changed_keys, flatten, make_config, may_change, plain_values, typed
from lm.runs.launching import BASIC, launch, launcher_of
from lm.runs.reading import has_figures, read_config
from lm.system.console import python_command, say
from lm.system.errors import UserError
from lm.system.interrupt import Stopped, StopRequest, Terminal

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
    def arguments(self) -> list[str]:
        """Of the run's own command line."""
        return [*self.overrides, f"run_dir={self.path}", "resume=auto", ONE_RUN]

    @property
    def finished(self) -> bool:
        """Whether the directory holds this very run, and it has reached its limits."""
        if not (self.path / "summary.json").exists():
            return False
        try:
            old, new = read_config(self.path), plain_values(self.config)
        except UserError:  # told by the run itself, which cannot go on with such settings
            return False
        before, now = flatten(old), flatten(new)
        limits = [key for key in now if key.startswith("trainer.max_")]
        return not list(changed_keys(old, new)) and all(before.get(key) == now[key] for key in limits)


def sweep(overrides: Sequence[str], folder: Path, *, compare: Callable[[list[Path]], None]) -> int:
    """Run what the overrides ask for and `compare` what came out; the exit code is 1 if any run failed."""
    jobs = plan(overrides, folder)
    failures = run_here(jobs) if launcher_of(overrides) == BASIC else run_elsewhere(jobs, overrides)
    try:
        if begun := [job.path for job in jobs if has_figures(job.path)]:
            compare(begun)
    finally:
        if failures:
            listed = "\n".join(failures.values())
            print(f"\n{len(failures)} of {len(jobs)} runs failed:\n{listed}", file=sys.stderr)
    return 1 if failures else 0


def run_here(jobs: Sequence[Job]) -> dict[Path, str]:
    """One after the other; what is to be told of those that failed."""
    failures: dict[Path, str] = {}
    with _PassedOn() as signals:
        for number, job in enumerate(jobs, 1):
            place = f"run {number} of {len(jobs)}: {job.path}"
            if job.finished:
                say(f"== {place} is finished ==")
                continue
            say(f"== {place} ==")
            code = signals.run([sys.executable, str(TRAIN), *job.arguments])
            if signals.first is not None:
                say(f"\nStopped in {place}. The same command goes on from there.")
                raise Stopped(128 + signals.first)
            if code != 0:
                failures[job.path] = _told(code, job)
                say(f"\n{place} failed; the others go on.")
            say()
    return failures


def run_elsewhere(jobs: Sequence[Job], overrides: Sequence[str]) -> dict[Path, str]:
    """All at once, by one of Hydra's launchers."""
    waiting = [job for job in jobs if not job.finished]
    if len(waiting) < len(jobs):
        say(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are finished")
    told = launch([job.arguments for job in waiting], overrides=overrides) if waiting else []
    return {
        job.path: f"  {job.path}: {reason or 'it has not reached its limits'}"
        for job, reason in zip(waiting, told, strict=True)
        if not job.finished
    }


def _told(code: int, job: Job) -> str:
    how = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
    if code == -signal.SIGKILL:
        how += ", perhaps for want of memory"
    command = shlex.join([python_command(), "train.py", *job.arguments])
    return f"  {job.path}: {how}; its message is above. By itself:\n    {command}"


# ---- which runs, and where ---------------------------------------------------------------------------------------


def plan(overrides: Sequence[str], folder: Path) -> list[Job]:
    """Every combination of the swept values; for a setting that is given twice the last word counts, as in Hydra."""
    with composer() as loader:
        groups = set(loader.list_groups(""))
        parsed = {o.get_key_element(): o for o in OverridesParser.create(loader).parse_overrides(list(overrides))}
        combinations = list(dict.fromkeys(itertools.product(*(each_value(o) for o in parsed.values()))))
        configs = [make_config(hydra.compose("train", list(chosen)), TrainConfig) for chosen in combinations]
    swept = [override.is_sweep_override() for override in parsed.values()]
    if (resume := configs[0].resume) not in (None, "auto"):
        raise UserError(f"resume={resume} names one run; those of a sweep are resumed by themselves. Leave it out.")
    home = Path(configs[0].run_dir) if configs[0].run_dir else folder / _folder_name(parsed, configs[0], groups)
    jobs = []
    for chosen, config in zip(combinations, configs, strict=True):
        labels = [_label(text, groups) for text, is_swept in zip(chosen, swept, strict=True) if is_swept]
        kept = [_as_typed(text, config) for text in chosen if text.partition("=")[0] not in ("run_dir", "resume")]
        jobs.append(Job(config, kept, home / _short("-".join(labels) or config.output.name)))
    names = [job.path.name for job in jobs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"Two runs of the sweep would share the directory {home / twice}. Start them one by one.")
    return jobs


def _folder_name(parsed: dict[str, Override], config: TrainConfig, groups: set[str]) -> str:
    """What all runs of the sweep have in common: the experiment or the corpus, then what was set besides.

    Limits, logging and device are left out: with others the same runs go on.
    """
    fixed = {key: each_value(o)[0] for key, o in parsed.items() if not o.is_sweep_override()}
    swept = parsed.keys() - fixed.keys()
    if "experiment" in fixed:
        first = fixed.pop("experiment").partition("=")[2]
    else:
        first = "sweep" if swept & {"experiment", "data"} else config.data.name
        fixed.pop("data", None)
    free = {*may_change(TrainConfig), "hydra"}
    rest = [_label(text, groups) for key, text in fixed.items() if not free & {key, re.split(r"[./]", key)[0]}]
    return _short("-".join([first, *rest]))


def _label(text: str, groups: set[str]) -> str:
    """`output=full` is full, `optim.lr=0.1` is lr-0.1, of a path its last part; only what any shell takes unquoted."""
    key, _, value = text.partition("=")
    if key in VERBATIM:
        value = value.rstrip("/'").rpartition("/")[2]
    parts = [value] if key in groups else [key.rpartition(".")[2], value]
    return "-".join(re.sub(r"[^\w.-]+", "-", part).strip("-") for part in parts)


def _short(name: str) -> str:
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _as_typed(text: str, config: TrainConfig) -> str:
    """An override as a person would type it: paths without the quotes they were given for Hydra."""
    key = text.partition("=")[0]
    return f"{key}={typed(flatten(plain_values(config))[key])}" if key in VERBATIM else text


# ---- the process at work -----------------------------------------------------------------------------------------


class _PassedOn:
    """While entered, Ctrl-C and SIGTERM go on to the run at work, which saves and ends; so does a terminal's closing.

    Each run is a process group of its own, so that a terminal's Ctrl-C reaches it once, through here, not twice.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Callable[..., Any] | int | None] = {}
        self._terminal = Terminal()

    def run(self, command: list[str]) -> int:
        """Start it and wait for its end; its exit code."""
        self._child = subprocess.Popen(command, process_group=0)
        if self.first is not None:  # asked while it was being started, or just before
            self._child.send_signal(self.first)
        return self._child.wait()

    def __enter__(self) -> "_PassedOn":
        heard = [number for number in StopRequest.SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup
        self._before = {number: signal.signal(number, self._pass_on) for number in heard}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if number == signal.SIGHUP:
            self._terminal.leave()
        self.first = self.first or number
        if self._child is not None:
            self._child.send_signal(number)
