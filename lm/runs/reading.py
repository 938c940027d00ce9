"""Runs as they lie on disk, finished or not: settings, figures, summary."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lm.config.validate import flatten
from lm.system.errors import UserError
from lm.training.metrics import read_metrics

PLACE = ("step", "epoch", "tokens", "train_seconds")
"""What every record says: where in the run it was taken."""


@dataclass(frozen=True)
class Evaluation:
    """A validation perplexity, and what it took to get there."""

    step: int
    tokens: int
    seconds: float
    """Of training; evaluation has its own clock."""
    perplexity: float
    ends_epoch: bool


@dataclass(frozen=True)
class Run:
    """One run's records."""

    path: Path
    settings: dict[str, Any]
    """By dotted key."""
    records: list[dict[str, Any]]
    summary: dict[str, Any] | None
    """None while the run has not reached its limits."""

    @property
    def layer(self) -> str:
        return str(self.settings["output.name"])

    @property
    def finished(self) -> bool:
        return self.summary is not None

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        """In the order of training. Every epoch's end is evaluated, so it is the first record with its number."""
        found: list[Evaluation] = []
        epoch = 0
        for record in self.records:
            if record.get("valid/ppl") is not None:
                found.append(
                    Evaluation(
                        step=record["step"],
                        tokens=record["tokens"],
                        seconds=record["train_seconds"],
                        perplexity=record["valid/ppl"],
                        ends_epoch=record["epoch"] > epoch,
                    )
                )
                epoch = record["epoch"]
        return found

    def figures(self, tag: str) -> list[float]:
        return [record[tag] for record in self.records if record.get(tag) is not None]

    @property
    def tokens_per_second(self) -> float | None:
        """The middle one of the logged speeds, which leave out the first steps of a process."""
        if logged := self.figures("speed/tokens_per_s"):
            return statistics.median(logged)
        last = self.records[-1]
        return last["tokens"] / last["train_seconds"] if last["train_seconds"] > 0 else None


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run folders among these paths and, in folders of runs, below them."""
    if not paths:
        raise UserError("RUNS must name at least one run folder or folder of runs; got none. Try runs/NAME or runs")
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            what = "is not a folder" if path.exists() else "does not exist"
            raise UserError(f"{path} {what}: a run folder (runs/NAME) or a folder of runs is needed.")
        # A run that is asked for by name must have figures; of many, those that are just beginning are passed over.
        below = [path] if _is_run(path) else [run for run in _runs_below(path) if has_figures(run)]
        if not below:
            raise UserError(f"{path} holds no run with figures: no folder in it has config.yaml and metrics.jsonl.")
        found |= {run.resolve(): run for run in below}
    return list(found.values())


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() or (path / "metrics.jsonl").is_file()


def _runs_below(path: Path) -> list[Path]:
    return sorted(file.parent for file in path.rglob("config.yaml"))


def has_figures(path: Path) -> bool:
    metrics = path / "metrics.jsonl"
    return metrics.is_file() and metrics.stat().st_size > 0


def read_run(path: Path) -> Run:
    """Everything a run has recorded; a UserError says what is missing or damaged."""
    settings = flatten(read_config(path))
    if not has_figures(path) or not (records := read_metrics(path)):
        raise UserError(
            f"{path} has no figures yet: its metrics.jsonl is missing or empty. Let it train to its first log, or "
            "leave it out."
        )
    for number, record in enumerate(records, 1):
        if not all(isinstance(record.get(key), int | float) for key in PLACE):
            raise UserError(
                f"{path / 'metrics.jsonl'} is damaged: record {number} does not say its {', '.join(PLACE)}. "
                "Restore the file, or leave the run out."
            )
    return Run(path, settings, records, _read_summary(path))


def read_config(path: Path) -> dict[str, Any]:
    """The settings of a run, nested as in its config.yaml."""
    file = path / "config.yaml"
    try:
        values = yaml.safe_load(file.read_bytes())
        if not isinstance(values, dict) or not {"data", "output", "trainer", "seed"} <= values.keys():
            raise ValueError
        if not all(isinstance(values[group].get("name"), str) for group in ("data", "output")):
            raise ValueError
    except FileNotFoundError:
        raise UserError(f"{path} is not a run: it has no config.yaml.") from None
    except (yaml.YAMLError, ValueError, AttributeError):
        raise UserError(f"{file} does not hold the settings of a run. Restore it, or leave the run out.") from None
    return values


def _read_summary(path: Path) -> dict[str, Any] | None:
    file = path / "summary.json"
    try:
        summary = json.loads(file.read_bytes())
        if not all(
            isinstance(summary[split].get(which, 0), float | int | None)
            for split in ("valid", "test")
            for which in ("last", "best")
        ) or not isinstance(summary["parameters"], int):
            raise ValueError
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{file} is damaged: it is not the summary of a run. Make it anew with "
            f"python train.py resume={path}, or leave the run out."
        ) from None
    return summary  # type: ignore[no-any-return]
