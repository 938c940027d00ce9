"""Runs on disk, finished or not: settings, records, summary."""

import gzip
import json
import statistics
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lm.config.resumable import defaults
from lm.config.schema import TrainConfig
from lm.config.validate import flatten
from lm.system.console import say
from lm.system.errors import UserError
from lm.training.metrics import COMPRESSED, FILE, metrics_file, read_metrics
from lm.training.provenance import read_starts

PLACE = ("step", "epoch", "tokens", "train_seconds")
"""Where in the run a record was taken; every record has these."""
FIGURES = ("valid/ppl", "speed/tokens_per_s", "memory/peak_gib", "parameters", "epochs")
"""Figures of a record that a comparison reads; optional."""
MOST_BRACKETS = 1000
"""In a config.yaml; a run writes hardly any."""
MALFORMED = (
    gzip.BadGzipFile,
    EOFError,
    zlib.error,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RecursionError,
    yaml.YAMLError,
)


@dataclass(frozen=True)
class Evaluation:
    """A validation perplexity, and the training it took."""

    tokens: float
    seconds: float
    """Training time; evaluations are not counted."""
    perplexity: float


@dataclass(frozen=True)
class Run:
    """What a run has recorded."""

    path: Path
    settings: dict[str, Any]
    """By dotted key."""
    records: list[dict[str, Any]]
    summary: dict[str, Any] | None
    """None until the run has reached its limits."""
    ranks: tuple[int, ...] = ()
    """On how many it was computed, in the order of its starts, each number once; empty where that is not recorded."""

    @property
    def kind(self) -> str:
        return str(self.settings.get("kind", "neural"))

    @property
    def layer(self) -> str:
        """The output layer, or what the run is instead of a neural model."""
        if self.kind == "ngram":
            return f"{self.settings.get('order')}-gram"
        return str(self.settings.get("output.name", self.kind))

    @property
    def trained(self) -> bool:
        """Whether it saw training text itself; a mixture combines runs that did."""
        return self.kind != "mixture"

    @property
    def finished(self) -> bool:
        return self.summary is not None

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        """In the order of training."""
        evaluated = [record for record in self.records if record.get("valid/ppl") is not None]
        return [Evaluation(r["tokens"], r["train_seconds"], r["valid/ppl"]) for r in evaluated]

    @property
    def source(self) -> str | None:
        """What its corpus is made of; None until the run has finished."""
        return (self.summary or {}).get("source")

    @property
    def text(self) -> str | None:
        """By which its vocabulary and splits are recognised; None where that is not recorded."""
        hashes = (self.summary or {}).get("corpus")
        return None if hashes is None else repr(hashes)

    def figures(self, tag: str) -> list[float]:
        return [record[tag] for record in self.records if record.get(tag) is not None]

    @property
    def tokens_per_second(self) -> float | None:
        """The median of the logged speeds, which leave out the first steps of a process."""
        if logged := self.figures("speed/tokens_per_s"):
            return statistics.median(logged)
        last = self.records[-1]
        return last["tokens"] / last["train_seconds"] or None if last["train_seconds"] > 0 else None

    def perplexity(self, split: str, which: str) -> float | None:
        """The `last` or `best` perplexity of a split, or of `test_without_unk`."""
        if split != "valid":
            return (self.summary or {}).get(split, {}).get(which)  # type: ignore[no-any-return]
        found = [evaluation.perplexity for evaluation in self.evaluations]
        return None if not found else min(found) if which == "best" else found[-1]


# ---- finding runs --------------------------------------------------------------------------------------------------


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """All runs at or below these paths; those that cannot be read are skipped, with the reason on stderr."""
    runs: list[Run] = []
    problems: list[str] = []
    for path in find_runs(paths):
        try:
            runs.append(read_run(path))
        except UserError as error:
            problems.append(str(error))
    if not runs:
        raise UserError(f"None of the {len(problems)} runs can be read. " * (len(problems) > 1) + problems[0])
    for problem in problems:
        say(f"Skipped: {problem}", to=sys.stderr)
    return runs


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run folders among these paths and below them."""
    if not paths:
        raise UserError("RUNS must name at least one run folder or folder of runs; got none. Try runs/NAME or runs")
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            what = "is not a folder" if path.exists() else "does not exist"
            raise UserError(f"{path} {what}: a run folder (runs/NAME) or a folder of runs is needed.")
        # A run given by name must have figures. In a folder of runs, those that have only just begun are left out.
        is_run = any((path / name).exists() for name in ("config.yaml", FILE, COMPRESSED))
        below = [path] if is_run else [f.parent for f in sorted(path.rglob("config.yaml")) if has_figures(f.parent)]
        if not below:
            raise UserError(f"{path} holds no run with figures: no folder in it has config.yaml and metrics.jsonl.")
        found |= {run.resolve(): run for run in below}
    return list(found.values())


def has_figures(path: Path) -> bool:
    metrics = metrics_file(path)
    return metrics.exists() and metrics.stat().st_size > 0


# ---- reading one run -----------------------------------------------------------------------------------------------


def read_run(path: Path) -> Run:
    """Everything a run has recorded; a UserError says what is missing or malformed."""
    starts = [start.get("ranks") for start in read_starts(path)]
    ranks = tuple(dict.fromkeys(number for number in starts if isinstance(number, int)))
    settings = flatten(read_config(path))
    if "kind" not in settings:
        settings = defaults(TrainConfig) | settings  # a run of an older version compares with one of today
    return Run(path, settings, _read_records(path), _read_summary(path), ranks)


def read_config(path: Path) -> dict[str, Any]:
    """The settings of a run, nested as in its config.yaml."""
    values = _load(path / "config.yaml", _parse_config, problem="it does not hold the settings of a run. Restore it,")
    if values is None:
        raise UserError(f"{path} is not a run: it has no config.yaml.")
    return values  # type: ignore[no-any-return]


def _read_records(path: Path) -> list[dict[str, Any]]:
    file = metrics_file(path)
    problem = f"a record lacks one of {', '.join(PLACE)}, or a figure is not a number. Restore it,"
    records = _load(file, lambda _: read_metrics(path), problem=problem)
    if not records:
        raise UserError(f"{path} has no figures yet: metrics.jsonl is missing or empty. Wait for its first log.")
    for record in records:
        sound = all(_is_number(record.get(key), most=1e15) for key in PLACE) and _are_figures(record, FIGURES)
        if not sound or record.get("valid/ppl") == 0:
            raise UserError(f"{file} is damaged: {problem} or leave the run out.")
    return records  # type: ignore[no-any-return]


def _read_summary(path: Path) -> dict[str, Any] | None:
    problem = f"it is not the summary of a run. Write it again with python train.py resume={path},"
    return _load(path / "summary.json", _parse_summary, problem=problem)  # type: ignore[no-any-return]


def _load(file: Path, parse: Callable[[Path], Any], *, problem: str) -> Any:
    """The parsed content of a file; None if it does not exist."""
    try:
        return parse(file)
    except FileNotFoundError:
        return None
    except MALFORMED:
        raise UserError(f"{file} is damaged: {problem} or leave the run out.") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from None


def _parse_config(file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    # A few lines of aliases can expand to more settings than fit into memory.
    deep = content.count(b"[") + content.count(b"{") > MOST_BRACKETS  # PyYAML takes quadratic time for nested ones
    if deep or any(isinstance(token, yaml.AliasToken) for token in yaml.scan(content)):
        raise ValueError
    values = yaml.safe_load(content)
    flat = flatten(values)
    mixed = flat.get("runs", [])
    if not isinstance(mixed, list) or not all(isinstance(name, str) for name in (flat["data.name"], *mixed)):
        raise ValueError
    if "kind" not in flat and (
        not isinstance(flat["output.name"], str) or "seed" not in flat or not isinstance(values["trainer"], dict)
    ):
        raise ValueError
    return values  # type: ignore[no-any-return]


def _parse_summary(file: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(file.read_bytes())
    splits = [summary["valid"], summary["test"], summary.get("test_without_unk", {})]
    if not all(_are_figures(split, ("last", "best")) for split in splits) or not _is_number(summary["parameters"]):
        raise ValueError
    if not isinstance(summary.get("source"), str | None) or not isinstance(summary.get("output", {}), dict):
        raise ValueError
    if not isinstance(summary.get("evaluate_streams"), int | None):
        raise ValueError
    if not isinstance(summary.get("output", {}).get("vocabulary"), int | None):
        raise ValueError
    return summary


def _are_figures(values: dict[str, Any], keys: Sequence[str]) -> bool:
    return all(values.get(key) is None or _is_number(values[key]) for key in keys)


def _is_number(value: Any, *, most: float = 1e305) -> bool:
    """Neither negative nor so large that sums of it overflow."""
    return isinstance(value, int | float) and 0 <= value <= most
