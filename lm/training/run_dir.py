"""Run directories: locked by their writer, never overwritten.

runs/pydoc-full-2026-11-16-05-00-12/
    config.yaml        the settings, resolved
    overrides.yaml     overrides of the command line, appended to by each resume
    run.json           each start: command, commit, versions, device, threads, ranks, host
    run.log            what the run printed, without progress bars
    metrics.jsonl      all metrics
    events.out.*       the same for TensorBoard
    checkpoints/       last.pt, best.pt
    summary.json       results, written when the run has reached its limits
"""

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from filelock import FileLock, Timeout

from lm.config.schema import TrainConfig
from lm.config.validate import changed_keys, flatten, read_settings
from lm.model.scoring import Score
from lm.system import checkpoint
from lm.system.console import say, transcript
from lm.system.devices import device_name
from lm.system.errors import UserError
from lm.system.files import write_json, write_text
from lm.system.interrupt import in_sweep
from lm.system.ranks import Ranks
from lm.training.metrics import Metrics
from lm.training.provenance import add_start

RUNS = Path("runs")
Values = dict[str, Any]


@dataclass(frozen=True)
class Start:
    """Where a run will write and what it resumes from. Nothing is written or locked yet."""

    path: Path | None
    """None: a new directory under runs/."""
    checkpoint: Path | None = None
    """None: a new run."""
    is_trusted: bool = True
    """False if settings come from a checkpoint named by the user; its data.root may be anywhere."""
    version: tuple[int, int] | None = None
    """The checkpoint's inode and time of modification when it was found."""


def resolve(config: TrainConfig) -> Start:
    """Find the run that `run_dir` and `resume` refer to: a new one, or one to resume."""
    given = Path(config.run_dir) if config.run_dir is not None else None
    if config.resume is None:
        return Start(given)
    if config.resume == "auto":
        return _resolve_auto(config, given)
    file = checkpoint.find(config.resume)
    home = file.parent.parent if file.parent.name == "checkpoints" else None
    if home is None or (given is not None and given.resolve() != home.resolve()):
        raise UserError(
            f"resume={config.resume} continues inside its own run directory; got run_dir={given or 'none'}. "
            "Resume a checkpoint where it stands, RUN/checkpoints/NAME.pt, and leave run_dir out."
        )
    return Start(home, file, is_trusted=False, version=_version(file))


def _resolve_auto(config: TrainConfig, given: Path | None) -> Start:
    path = given or newest_unfinished(config)
    last = path / "checkpoints" / checkpoint.LAST if path is not None else None
    if path is not None and last is not None and last.exists():
        return Start(path, last, version=_version(last))
    if path is not None and _has_begun(path):
        best = path / "checkpoints" / checkpoint.BEST
        raise UserError(
            f"{path} holds a run without checkpoints/{checkpoint.LAST}, which is not overwritten. "
            f"Try {f'resume={best}, or ' if best.exists() else ''}another run_dir."
        )
    if not in_sweep():
        say("resume=auto: found no unfinished run with these settings; starting a new one.")
    return Start(path)


class RunDir:
    """A run's directory, locked by its writer. With `lock=False` another rank holds the lock, and this one reads."""

    def __init__(self, path: Path, *, lock: bool = True) -> None:
        self.path, self.checkpoints = path, path / "checkpoints"
        self.last, self.best = self.checkpoints / checkpoint.LAST, self.checkpoints / checkpoint.BEST
        if not lock:
            return
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(path / ".lock")
            self._lock.acquire(blocking=False)
            (path / ".lock").write_text(f"process {os.getpid()} on {os.uname().nodename}")
        except Timeout:
            raise UserError(
                f"run_dir={path} is being written by {(path / '.lock').read_text() or 'another process'}. "
                "Wait for it, stop it, or choose another run_dir."
            ) from None
        except OSError as error:
            raise UserError(
                f"run_dir={path} cannot be written: {error.strerror}. Try another folder with run_dir=PATH."
            ) from None

    def write_settings(self, values: dict[str, Any]) -> None:
        """Write config.yaml."""
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        write_text(self.path / "config.yaml", text)

    @contextmanager
    def record(self, overrides: Sequence[str], *, device: torch.device, num_ranks: int = 1) -> Iterator[None]:
        """Add this start to run.json and overrides.yaml; inside the context, copy output to run.log."""
        add_start(self.path, device=device_name(device), threads=torch.get_num_threads(), num_ranks=num_ranks)
        with (self.path / "overrides.yaml").open("a", encoding="utf-8") as file:
            file.writelines(yaml.safe_dump([text], allow_unicode=True) for text in overrides)
        with transcript(self.path / "run.log"):
            yield

    def close(self) -> None:
        self._lock.release()


@contextmanager
def open_run_dir(
    start: Start, config: TrainConfig, *, overrides: Sequence[str], device: torch.device, ranks: Ranks
) -> Iterator[RunDir]:
    """Lock or create the run's directory on rank 0 and record this start."""
    held: list[RunDir] = []

    def hold() -> Path:
        held.append(_lock_resumed(start) if start.checkpoint is not None else _create(config, start.path))
        return held[0].path

    path = ranks.from_rank0(hold)
    if not held:
        yield RunDir(path, lock=False)
        return
    with closing(held[0]) as run_dir:
        if start.checkpoint is not None and start.checkpoint != run_dir.last:
            checkpoint.share(start.checkpoint, run_dir.last)
        run_dir.write_settings(asdict(config))
        (path / "summary.json").unlink(missing_ok=True)
        with run_dir.record(overrides, device=device, num_ranks=ranks.size):
            yield run_dir


def _lock_resumed(start: Start) -> RunDir:
    assert start.path is not None and start.checkpoint is not None
    run_dir = RunDir(start.path)
    if _version(start.checkpoint) != start.version:  # replaced before the lock was acquired
        run_dir.close()
        raise UserError(f"{start.path} was resumed by another process in the meantime. Run the same command again.")
    return run_dir


def _version(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_ino, stat.st_mtime_ns


def _create(config: TrainConfig, path: Path | None) -> RunDir:
    """Create a new run's directory: `path`, or runs/DATA-OUTPUT-TIMESTAMP."""
    if path is None:
        return RunDir(_fresh(f"{config.data.name}-{config.output.name}"))
    run = RunDir(path)
    # Checked under the lock: another process may just have finished a run here.
    if _has_begun(path) or (config.resume is None and (path / "config.yaml").exists()):
        run.close()
        raise UserError(
            f"run_dir={path} already holds a run, which is never overwritten. "
            "Try resume=auto to continue it, or another run_dir."
        )
    return run


def _has_begun(path: Path) -> bool:
    """Whether a directory contains checkpoints, metrics or a summary."""
    metrics = path / "metrics.jsonl"
    return (
        any((path / "checkpoints").glob("*.pt"))
        or (path / "summary.json").exists()
        or (metrics.exists() and metrics.stat().st_size > 0)
    )


def start_over(path: Path | None, *, name: str, kind: str) -> RunDir:
    """Open a directory for a run that cannot be resumed: a new one, or that of an interrupted run, which restarts."""
    if path is None:
        return RunDir(_fresh(name))
    run = RunDir(path)
    begun = read_settings(path).get("kind") == kind and not (path / "summary.json").exists()
    if not begun and (_has_begun(path) or (path / "config.yaml").exists()):
        run.close()
        raise UserError(f"{path} already holds a run, which is never overwritten. Choose another directory.")
    for old in ("overrides.yaml", "run.json", "run.log", "metrics.jsonl"):
        (path / old).unlink(missing_ok=True)
    return run


def _fresh(prefix: str) -> Path:
    name = f"{prefix}-{time.strftime('%Y-%m-%d-%H-%M-%S')}"
    for attempt in itertools.count(1):
        path = RUNS / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            path.mkdir(parents=True)  # succeeds for only one of several processes
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(
                f"{RUNS} cannot be written: {error.strerror}. Try another folder with run_dir=PATH."
            ) from None
    raise AssertionError("unreachable")


def newest_unfinished(config: TrainConfig) -> Path | None:
    """Find the newest unfinished run under runs/ with the same settings."""
    wanted = asdict(config)
    lasts = sorted(RUNS.glob(f"*/checkpoints/{checkpoint.LAST}"), key=lambda last: last.stat().st_mtime, reverse=True)
    runs = [last.parents[1] for last in lasts if not (last.parents[1] / "summary.json").exists()]
    return next((run for run in runs if not list(changed_keys(read_settings(run), wanted))), None)


def write_results(
    run_dir: RunDir, settings: Values, position: Values, scores: dict[str, Score], *, metrics: Values, more: Values
) -> None:
    """Write metrics, TensorBoard events and summary.json; `more` is merged into the summary."""
    values = dict(metrics)
    summary: dict[str, Any] = {**position, "valid": {}, "test": {}}
    for split, score in scores.items():
        values |= {f"{split}/loss": score.loss, f"{split}/ppl": score.perplexity}
        summary[split] = dict.fromkeys(("last", "best"), score.perplexity)
        summary[f"{split}_without_unk"] = dict.fromkeys(("last", "best"), score.perplexity_without_unk)
        summary |= {"oov_rate": score.oov_rate, "evaluate_streams": score.streams}
    with closing(Metrics(run_dir.path, settings=flatten(settings))) as log:
        log.write({**position, **values})
        log.finish()
    write_json(run_dir.path / "summary.json", summary | more)
