"""One directory per run: named readably, locked by the process that writes it, never overwritten.

runs/pydoc-full-2026-11-16-05-00-12/
    config.yaml        the settings, resolved
    metrics.jsonl      every figure
    events.out.*       the same for TensorBoard, which so shows the run under its own name
    checkpoints/       last.pt, best.pt
    summary.json       written when the run has reached its limits
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lm import checkpoint
from lm.config import Config, Schedule
from lm.errors import UserError
from lm.files import write_whole
from lm.validation import flatten, may_change, plain_values

RUNS = Path("runs")


class RunDir:
    """A run's directory, held by this process until it ends or `close` is called."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = (path / ".lock").open("a+")
        except OSError as error:
            raise UserError(
                f"run_dir={path} cannot be written: {error.strerror}. Try run_dir=PATH with another."
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            raise UserError(
                f"run_dir={path} is being written by {self._lock.read().strip() or 'another process'}. "
                "Wait for it, stop it, or choose another run_dir."
            ) from None
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {os.uname().nodename}")
        self._lock.flush()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def last(self) -> Path:
        return self.checkpoints / checkpoint.LAST

    @property
    def best(self) -> Path:
        return self.checkpoints / checkpoint.BEST

    def write_config(self, config: Config) -> None:
        text = OmegaConf.to_yaml(OmegaConf.create(plain_values(config)))
        write_whole(self.path / "config.yaml", lambda file: file.write(text.encode()))

    def write_summary(self, summary: dict[str, Any]) -> None:
        text = json.dumps(summary, indent=2) + "\n"
        write_whole(self.path / "summary.json", lambda file: file.write(text.encode()))

    def close(self) -> None:
        self._lock.close()


def choose(config: Config) -> tuple[Path, Path | None]:
    """Where the run writes, and the checkpoint it continues from, by `run_dir` and `resume`."""
    given = Path(config.run_dir) if config.run_dir is not None else None
    if config.resume is None:
        if given is not None and (given / "config.yaml").exists():
            raise UserError(
                f"run_dir={given} already holds a run, which is never overwritten. "
                "Try resume=auto to continue it, or another run_dir."
            )
        return given or fresh_name(config), None
    if config.resume == "auto":
        path = given or newest_unfinished(config) or fresh_name(config)
        last = path / "checkpoints" / checkpoint.LAST
        return path, last if last.exists() else None
    file = checkpoint.find(config.resume)
    home = file.parent.parent if file.parent.name == "checkpoints" else None
    if home is None or (given is not None and given.resolve() != home.resolve()):
        raise UserError(
            f"resume={config.resume} continues inside its own run directory; got run_dir={given or 'none'}. "
            "Resume a checkpoint where it stands, RUN/checkpoints/NAME.pt, and leave run_dir out."
        )
    return home, file


def fresh_name(config: Config) -> Path:
    """A name that says what the run is, and when it began."""
    name = f"{config.data.name}-{config.output.name}-{time.strftime('%Y-%m-%d-%H-%M-%S')}"
    path, number = RUNS / name, 1
    while path.exists():
        number += 1
        path = RUNS / f"{name}-{number}"
    return path


def newest_unfinished(config: Config) -> Path | None:
    """The latest run under runs/ with the same settings that has not reached its limits."""
    wanted = plain_values(config)
    candidates = [
        path
        for path in RUNS.glob("*")
        if (path / "checkpoints" / checkpoint.LAST).exists()
        and not (path / "summary.json").exists()
        and not list(changed_keys(_read_config(path), wanted))
    ]
    return max(candidates, key=lambda path: checkpoint.modified(path / "checkpoints" / checkpoint.LAST), default=None)


def changed_keys(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Settings that differ between a run and its continuation though they must not."""
    free = set(may_change(Config))
    if new["optim"]["schedule"] == Schedule.halve_after_half.value:
        free.discard("trainer.max_epochs")  # the schedule is counted from it
    before, after = flatten(old), flatten(new)
    for key in sorted(before.keys() | after.keys()):
        chosen = key == "output.cutoffs" and after.get(key) == "auto"  # a run keeps what was chosen when it began
        if key not in free and not chosen and before.get(key) != after.get(key):
            yield key, before.get(key), after.get(key)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        values = OmegaConf.to_container(OmegaConf.load(path / "config.yaml"))
    except OSError:
        return {}
    assert isinstance(values, dict)
    return values  # type: ignore[return-value]
