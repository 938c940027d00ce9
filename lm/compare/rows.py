"""Turn runs into the rows of a comparison: one section per corpus, one row per setting, seeds merged."""

import itertools
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lm.compare.paper import PaperResult, published
from lm.compare.run_records import Evaluation, Run
from lm.config.groups import LIMITS
from lm.config.schema import TrainConfig
from lm.config.validate import may_change, typed

AFFECTS_RESULTS = {f"trainer.{key}" for key in (*LIMITS, "patience", "device", "threads", "profile")}
IMMATERIAL = {
    "seed",
    "data.root",
    "data.archive",
    "output.cost_model",
    "out",
    *may_change(TrainConfig),
} - AFFECTS_RESULTS
"""Settings that may differ between repetitions of a run."""

MAX_VALUES = 3
"""Maximum number of settings in a row's label."""
PARTS = ("output", "input", "model", "optim")
"""Groups of settings that name a plug-in."""
IN_NAME = ("kind", "order", "runs", "weights")
"""Settings already shown in the names of n-gram models and mixtures."""


@dataclass(frozen=True)
class Mean:
    """Mean over repetitions, with a standard deviation if there are several."""

    mean: float
    spread: float | None


@dataclass
class Row:
    """Runs that differ only in their seed."""

    runs: list[Run]
    label: str = ""
    speed_up: float | None = None
    """Tokens per second relative to the full softmax with the same settings."""
    relative_perplexity: float | None = None
    """Validation perplexity relative to the full softmax with the same settings."""

    @property
    def layer(self) -> str:
        return self.runs[0].layer

    @property
    def finished(self) -> bool:
        return self.runs[0].finished

    @property
    def paper(self) -> PaperResult | None:
        return published(self.runs[0].settings, vocab_size=self.runs[0].vocab_size)

    @property
    def epochs(self) -> float | None:
        return statistics.fmean(run.epochs for run in self.runs) if self.runs[0].trained else None

    def mean(self, of: Callable[[Run], float | None]) -> Mean | None:
        """Average a value over the repetitions that have it."""
        known = [value for run in self.runs if (value := of(run)) is not None]
        if not known:
            return None
        return Mean(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)

    @property
    def perplexity(self) -> float:
        """The last validation perplexity, by which rows are sorted; inf if there is none."""
        perplexity = self.mean(lambda run: run.perplexity("valid", "last"))
        return perplexity.mean if perplexity is not None else math.inf

    @property
    def has_pieces(self) -> bool:
        """Whether the row's perplexities are per subword."""
        return self.runs[0].settings.get("data.tokenizer") == "sentencepiece"

    @cached_property
    def curve(self) -> list[tuple[Evaluation, float, float]]:
        """Mean, minimum and maximum perplexity over repetitions; their evaluations are paired in order, last with last.

        Evaluations scheduled by time happen at different steps in each repetition.
        """
        points = []
        fewest = min(len(run.evaluations) for run in self.runs)
        paired = [[*run.evaluations[: fewest - 1], run.evaluations[-1]] for run in self.runs] if fewest else []
        for at in zip(*paired, strict=True):
            values = [e.perplexity for e in at]
            tokens, seconds = statistics.fmean(e.tokens for e in at), statistics.fmean(e.seconds for e in at)
            points.append((Evaluation(tokens, seconds, statistics.fmean(values)), min(values), max(values)))
        return points


@dataclass
class Section:
    """Rows of one corpus, with comparable perplexities."""

    name: str
    rows: list[Row]
    beside_pieces: bool = False
    """Whether the comparison includes runs on subwords."""

    @property
    def source(self) -> str | None:
        """Description of the corpus, if all runs agree on it."""
        sources = {run.source for row in self.rows for run in row.runs} - {None}
        return sources.pop() if len(sources) == 1 else None

    @property
    def winner(self) -> Row | None:
        """The finished row with the lowest validation perplexity; None if there is only one row."""
        finished = [row for row in self.rows if row.finished and row.perplexity < math.inf]
        return min(finished, key=lambda row: row.perplexity) if len(self.rows) > 1 and finished else None

    @property
    def has_repetitions(self) -> bool:
        return any(len(row.runs) > 1 for row in self.rows)

    @property
    def has_paper(self) -> bool:
        return any(row.paper for row in self.rows)


def sections(runs: Sequence[Run]) -> list[Section]:
    """Group runs by corpus, merge repetitions, label the rows, and sort them by perplexity."""
    by_corpus: dict[Any, list[Run]] = defaultdict(list)
    texts: dict[Any, str | None] = {}
    for run in sorted(runs, key=lambda run: run.text is None):
        settings = _identity(run, only="data.", without="data.sequences")
        # The same settings may mean different texts (another `data.archive`). Unfinished runs do not record theirs.
        text = run.text or texts.get(settings)
        texts.setdefault(settings, text)
        by_corpus[settings, text].append(run)
    by_name: dict[str, Section] = {}
    for members in by_corpus.values():
        base = _corpus_name(members[0])
        numbered = (f"{base}-{i}" for i in itertools.count(2))  # the same corpus with other settings
        name = next(name for name in itertools.chain([base], numbered) if name not in by_name)
        by_name[name] = Section(name, _rows(members))
    with_pieces = any(row.has_pieces for section in by_name.values() for row in section.rows)
    return [replace(section, beside_pieces=with_pieces) for section in by_name.values()]


def _rows(runs: Sequence[Run]) -> list[Row]:
    def key(run: Run, again: int) -> Any:
        return _identity(run), run.ranks, run.finished or run.path, again

    merged: dict[Any, Row] = {}
    for run in runs:
        # Unfinished runs are at different steps, so they are not merged. A repeated seed gets
        # another row, because it says nothing about the variance.
        again = 0
        while run.settings.get("seed") in [r.settings.get("seed") for r in merged.get(key(run, again), Row([])).runs]:
            again += 1
        merged.setdefault(key(run, again), Row([])).runs.append(run)
    rows = sorted(merged.values(), key=lambda row: row.perplexity)
    _label(rows)
    full = {_beside_output(row.runs[0]): row for row in reversed(rows) if row.layer == "full"}
    for row in rows:
        base = full.get(_beside_output(row.runs[0]))
        ours, theirs = (each and each.mean(lambda run: run.tokens_per_second) for each in (row, base))
        row.speed_up = ours.mean / theirs.mean if ours and theirs and theirs.mean else None
        known = base is not None and math.isfinite(row.perplexity) and math.isfinite(base.perplexity)
        if base and known and row.finished and base.finished:
            row.relative_perplexity = row.perplexity / base.perplexity
    return rows


def _label(rows: Sequence[Row]) -> None:
    """Label each row by the settings that set it apart from similar rows, or by its folder if there are many."""
    for row in rows:
        run, settings = row.runs[0], _requested_settings(row.runs[0])
        kin = [_requested_settings(other.runs[0]) for other in rows if other.runs[0].kind == run.kind]
        keys = [key for key in settings if key not in IN_NAME and _differs(key, settings, kin)]
        names = [str(settings[f"{part}.name"]) for part in PARTS if f"{part}.name" in keys] or [run.layer]
        if mixed := settings.get("runs"):
            names = ["mixture of " + " + ".join(Path(str(folder)).name for folder in mixed)]
        values = [f"{key.rpartition('.')[2]} {typed(settings[key])}" for key in keys if not key.endswith(".name")]
        if run.ranks and len({other.runs[0].ranks for other in rows} - {()}) > 1:  # mixtures have none
            values.append(f"ranks {' then '.join(map(str, run.ranks))}")
        row.label = ", ".join([*names, *(values if len(values) <= MAX_VALUES else [run.path.resolve().name])])
    for same in [[row for row in rows if row.label == label] for label in {row.label for row in rows}]:
        names = [row.runs[0].path.name for row in same]
        for row, name in zip(same, names, strict=True):
            if len(same) > 1:
                row.label += f" ({name if len(set(names)) == len(names) else row.runs[0].path})"


def _differs(key: str, settings: dict[str, Any], others: Sequence[dict[str, Any]]) -> bool:
    """Whether a setting differs from that of another row using the same plug-in, and is not what most rows have."""
    plugin = f"{key.partition('.')[0]}.name"
    values = [repr(other.get(key)) for other in others if key == plugin or other.get(plugin) == settings.get(plugin)]
    usual = 2 * values.count(repr(settings[key])) > max(4, len(values)) and key != plugin
    return key not in IMMATERIAL and len(set(values)) > 1 and not usual


def _requested_settings(run: Run) -> dict[str, Any]:
    """Return the settings with automatically chosen cutoffs replaced by `auto`."""
    chosen = (run.summary or {}).get("output", {}).get("predicted")
    return run.settings | ({"output.cutoffs": "auto"} if chosen else {})


def _identity(run: Run, *, only: str = "", without: str = "\0") -> frozenset[tuple[str, str]]:
    return frozenset(
        (key, repr(value))
        for key, value in run.settings.items()
        if key not in IMMATERIAL and key.startswith(only) and not key.startswith(without)
    )


def _beside_output(run: Run) -> Any:
    """Settings that must match for output-layer speeds to be comparable across runs."""
    return _identity(run, without="output."), run.ranks


def _corpus_name(run: Run) -> str:
    parts = [run.settings["data.name"], run.settings.get("data.language")]
    if folder := run.settings.get("data.dir"):
        parts.append(Path(str(folder)).name)
    if Row([run]).has_pieces:
        parts.append(f"sp{run.settings.get('data.vocab_size')}")
    return "-".join(re.sub(r"[^\w.-]+", "-", str(part))[:80] for part in parts if part)  # used in file names
