"""Read runs from disk, finished or not: settings, metrics, summary."""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from lm.config.schema import TrainConfig
from lm.config.validate import defaults, flatten, read_settings
from lm.system.console import say
from lm.system.errors import UserError
from lm.training.metrics import COMPRESSED, FILE, metrics_file, read_metrics
from lm.training.provenance import read_starts


class Evaluation(NamedTuple):
    """A validation perplexity and the amount of training before it."""

    tokens: float
    seconds: float
    """Training time without evaluations."""
    perplexity: float


@dataclass(frozen=True)
class Run:
    """A run as recorded on disk."""

    path: Path
    settings: dict[str, Any]
    """The run's settings by dotted key."""
    records: list[dict[str, Any]]
    summary: dict[str, Any] | None
    """None until the run has finished."""
    ranks: tuple[int, ...] = ()
    """World sizes the run was started with; empty if unknown."""

    @property
    def kind(self) -> str:
        """Kind of run: neural, ngram or mixture."""
        return str(self.settings.get("kind", "neural"))

    @property
    def layer(self) -> str:
        """The output layer, or the kind of a run without one."""
        if self.kind == "ngram":
            features = self.settings.get("features")
            return f"SNM {features}" if features else f"{self.settings.get('order')}-gram"
        return str(self.settings.get("output.name", self.kind))

    @property
    def trained(self) -> bool:
        """Whether the run itself was trained; mixtures only combine trained runs."""
        return self.kind != "mixture"

    @property
    def finished(self) -> bool:
        return self.summary is not None

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        """Evaluations in training order."""
        evaluated = [record for record in self.records if record.get("valid/ppl") is not None]
        return [Evaluation(float(r["tokens"]), float(r["train_seconds"]), float(r["valid/ppl"])) for r in evaluated]

    @property
    def source(self) -> str | None:
        """Description of the corpus; None until the run has finished."""
        return (self.summary or {}).get("source")

    @property
    def text(self) -> str | None:
        """Hashes of vocabulary and splits; None if unknown."""
        hashes = (self.summary or {}).get("corpus")
        return None if hashes is None else repr(hashes)

    @property
    def vocab_size(self) -> int | None:
        return (self.summary or {}).get("output", {}).get("vocabulary")  # type: ignore[no-any-return]

    @property
    def parameters(self) -> int | None:
        values = self.metric("parameters") if self.summary is None else [self.summary["parameters"]]
        return int(values[0]) if values else None

    @property
    def epochs(self) -> float:
        """Epochs over the training text, including fractions."""
        last = self.records[-1]
        return float(last.get("epochs", last["epoch"]))

    @property
    def minutes(self) -> float | None:
        """Training time in minutes; None for mixtures."""
        return float(self.records[-1]["train_seconds"]) / 60 if self.trained else None

    @property
    def peak_gib(self) -> float | None:
        return max(self.metric("memory/peak_gib"), default=None)

    def metric(self, tag: str) -> list[float]:
        """Return all recorded values of a metric."""
        return [float(record[tag]) for record in self.records if record.get(tag) is not None]

    @property
    def tokens_per_second(self) -> float | None:
        """Median logged speed; logs exclude the first steps of a process."""
        if logged := self.metric("speed/tokens_per_s"):
            return statistics.median(logged)
        last = self.records[-1]
        return last["tokens"] / last["train_seconds"] or None if last["train_seconds"] > 0 else None

    def perplexity(self, split: str, which: str) -> float | None:
        """Return the `last` or `best` perplexity of a split or of `test_without_unk`."""
        if split != "valid":
            value = (self.summary or {}).get(split, {}).get(which)
            return None if value is None else float(value)
        values = [evaluation.perplexity for evaluation in self.evaluations]
        return None if not values else min(values) if which == "best" else values[-1]

    def check(self) -> None:
        """Compute everything a comparison needs, raising an error if a file lacks it."""
        for split in ("valid", "test", "test_without_unk"):
            self.perplexity(split, "last"), self.perplexity(split, "best")
        _ = self.parameters, self.epochs, self.minutes, self.tokens_per_second, self.peak_gib, self.vocab_size
        str(self.settings["data.name"]), list(self.settings.get("runs", []))


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read all runs at or below these paths; skip unreadable ones, with the reason on stderr."""
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
    """Find run directories at or below these paths, without duplicates. Inside a folder, skip runs without metrics."""
    if not paths:
        raise UserError("RUNS must name at least one run directory or folder of runs; got none. Try runs/NAME or runs.")
    runs: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            what = "is not a folder" if path.exists() else "does not exist"
            raise UserError(f"{path} {what}: a run directory (runs/NAME) or a folder of runs is needed.")
        is_run = any((path / name).exists() for name in ("config.yaml", FILE, COMPRESSED))
        below = [path] if is_run else [f.parent for f in sorted(path.rglob("config.yaml")) if has_metrics(f.parent)]
        if not below:
            raise UserError(f"{path} holds no run with metrics: no folder in it has config.yaml and metrics.jsonl.")
        runs |= {run.resolve(): run for run in below}
    return list(runs.values())


def has_metrics(path: Path) -> bool:
    metrics = metrics_file(path)
    return metrics.exists() and metrics.stat().st_size > 0


def read_run(path: Path) -> Run:
    """Read a run's records; raises UserError if they cannot be read."""
    try:
        if not (settings := flatten(read_settings(path))):
            raise UserError(f"{path} has no readable config.yaml. Restore it, or leave the run out.")
        if "kind" not in settings:
            settings = defaults(TrainConfig) | settings  # runs of older versions lack newer settings
        records = read_metrics(path) if has_metrics(path) else []
        if not records:
            raise UserError(f"{path} has no metrics yet: metrics.jsonl is missing or empty. Wait for its first log.")
        file = path / "summary.json"
        summary = json.loads(file.read_bytes()) if file.exists() else None
        ranks = [start.get("ranks") for start in read_starts(path)]
        run = Run(path, settings, records, summary, tuple(dict.fromkeys(n for n in ranks if isinstance(n, int))))
        run.check()
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{error.filename or path} cannot be read: {error.strerror or error}.") from None
    except Exception as error:  # a damaged file can fail anywhere
        raise UserError(
            f"{path} is damaged: its files do not hold the settings, metrics and summary of a run "
            f"({type(error).__name__}). Restore them, or leave the run out."
        ) from None
    return run
