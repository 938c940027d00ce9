"""From runs to the rows of a comparison: a section per corpus, a row per layer; seeds are merged."""

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lm.compare.paper import LAYERS, PaperFigures, published
from lm.compare.run_records import Evaluation, Run
from lm.config.groups import LIMITS
from lm.config.resumable import may_change
from lm.config.schema import TrainConfig
from lm.config.validate import typed

BEARS_ON_FIGURES = {f"trainer.{key}" for key in (*LIMITS, "patience", "device", "threads", "profile")}
IMMATERIAL = {
    "seed",
    "data.root",
    "data.archive",
    "output.cost_model",
    "out",
    *may_change(TrainConfig),
} - BEARS_ON_FIGURES
"""Settings in which two runs may differ and still be repetitions of each other."""

MOST_VALUES = 3
"""Settings that a row's label lists."""

PARTS = ("output", "input", "model", "optim")
"""Groups of settings that name a plug-in."""


@dataclass(frozen=True)
class Figure:
    """The mean over the repetitions of a run and, if there are several, the standard deviation."""

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
    def settings(self) -> dict[str, Any]:
        return self.runs[0].settings

    @property
    def finished(self) -> bool:
        return self.runs[0].finished

    @property
    def paper(self) -> PaperFigures | None:
        described = (self.runs[0].summary or {}).get("output", {})
        return published(self.settings, vocab_size=described.get("vocabulary"))

    @property
    def parameters(self) -> int | None:
        run = self.runs[0]
        found = [run.summary["parameters"]] if run.summary else run.figures("parameters")
        return int(found[0]) if found else None

    @property
    def epochs(self) -> float | None:
        """Passes over the training text, parts of one included."""
        if not self.runs[0].trained:
            return None
        return statistics.fmean(run.records[-1].get("epochs", run.records[-1]["epoch"]) for run in self.runs)

    def figure(self, of: Callable[[Run], float | None]) -> Figure | None:
        """A figure of a run, over the repetitions that have it."""
        known = [value for run in self.runs if (value := of(run)) is not None]
        if not known:
            return None
        return Figure(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)

    @property
    def perplexity(self) -> float:
        """By which rows are sorted: the last on the validation text."""
        figure = self.figure(lambda run: run.perplexity("valid", "last"))
        return figure.mean if figure is not None else math.inf

    @property
    def tokens_per_second(self) -> Figure | None:
        return self.figure(lambda run: run.tokens_per_second)

    @property
    def has_pieces(self) -> bool:
        """Whether its perplexities are per subword."""
        return self.settings.get("data.tokenizer") == "sentencepiece"

    @cached_property
    def curve(self) -> list[tuple[Evaluation, float, float]]:
        """Mean, lowest and highest perplexity at each amount of tokens at which all repetitions were evaluated.

        Where evaluations are due after so many seconds they fall on different steps: then of the first of each
        repetition, of the second... and of the last.
        """
        points = []
        fewest = min(len(run.evaluations) for run in self.runs)
        shared = set.intersection(*({e.tokens for e in run.evaluations} for run in self.runs))
        if 2 * len(shared) >= fewest:
            paired = [[e for e in run.evaluations if e.tokens in shared] for run in self.runs]
        else:
            paired = [[*run.evaluations[: fewest - 1], run.evaluations[-1]] for run in self.runs]
        for at in zip(*paired, strict=True):
            values = [e.perplexity for e in at]
            tokens, seconds = statistics.fmean(e.tokens for e in at), statistics.fmean(e.seconds for e in at)
            points.append((Evaluation(tokens, seconds, statistics.fmean(values)), min(values), max(values)))
        return points


@dataclass
class Section:
    """The rows of one corpus, whose perplexities can be compared."""

    name: str
    rows: list[Row]
    beside_pieces: bool = False
    """Whether the comparison includes runs on subwords."""

    @property
    def source(self) -> str | None:
        """What the corpus is made of, if the runs agree on it."""
        sources = {run.source for row in self.rows for run in row.runs} - {None}
        return sources.pop() if len(sources) == 1 else None

    @property
    def winner(self) -> Row | None:
        """Of several rows, the finished one with the lowest validation perplexity."""
        finished = [row for row in self.rows if row.finished and row.perplexity < math.inf]
        return min(finished, key=lambda row: row.perplexity) if len(self.rows) > 1 and finished else None

    @property
    def has_repetitions(self) -> bool:
        return any(len(row.runs) > 1 for row in self.rows)

    @property
    def has_paper(self) -> bool:
        return any(row.paper for row in self.rows)


def sections(runs: Sequence[Run]) -> list[Section]:
    """The runs by corpus: repetitions merged, labelled, the paper's layers first."""
    by_corpus: dict[Any, list[Run]] = defaultdict(list)
    texts: dict[Any, str | None] = {}
    for run in sorted(runs, key=lambda run: run.text is None):
        settings = _identity(run, only="data.")
        # The same settings may stand for different texts (another `data.archive`). Unfinished runs do not say.
        text = run.text or texts.get(settings)
        texts.setdefault(settings, text)
        by_corpus[settings, text].append(run)
    found: dict[str, Section] = {}
    for members in by_corpus.values():
        name = base = _corpus_name(members[0])
        number = 1
        while name in found:  # the same corpus with other settings
            number += 1
            name = f"{base}-{number}"
        found[name] = Section(name, _rows(members))
    with_pieces = any(row.has_pieces for section in found.values() for row in section.rows)
    return [replace(section, beside_pieces=with_pieces) for section in found.values()]


def _rows(runs: Sequence[Run]) -> list[Row]:
    def key(run: Run, again: int) -> Any:
        return _identity(run), run.ranks, run.finished or run.path, again

    merged: dict[Any, Row] = {}
    for run in runs:
        # Unfinished runs are at different steps, so each is a row of its own. A second run of a seed repeats the first
        # one's figures, which says nothing of how they vary: it begins another row.
        again = 0
        while run.settings.get("seed") in [r.settings.get("seed") for r in merged.get(key(run, again), Row([])).runs]:
            again += 1
        merged.setdefault(key(run, again), Row([])).runs.append(run)
    rows = sorted(merged.values(), key=lambda row: LAYERS.index(row.layer) if row.layer in LAYERS else len(LAYERS))
    rows.sort(key=lambda row: row.perplexity)
    _label(rows)
    full = {_beside_output(row.runs[0]): row for row in reversed(rows) if row.layer == "full"}
    for row in rows:
        base = full.get(_beside_output(row.runs[0]))
        ours, theirs = row.tokens_per_second, base.tokens_per_second if base else None
        row.speed_up = ours.mean / theirs.mean if ours and theirs and theirs.mean else None
        known = base is not None and math.isfinite(row.perplexity) and math.isfinite(base.perplexity)
        if base and known and row.finished and base.finished:
            row.relative_perplexity = row.perplexity / base.perplexity
    return rows


def _label(rows: Sequence[Row]) -> None:
    """Name each row by the parts of the model in which it differs from the others, and by the settings."""
    everything = [_as_asked(row.runs[0]) for row in rows]
    for row, settings in zip(rows, everything, strict=True):
        # n-grams and mixtures have other settings than neural models, which would all differ.
        same_kind = [other for other, its in zip(everything, rows, strict=True) if its.runs[0].kind == row.runs[0].kind]
        differing = [part for part in PARTS if _differing(same_kind, f"{part}.name".__eq__)] or ["output"]
        general = _differing(same_kind, lambda key: key.partition(".")[0] not in (*PARTS, "order", "runs", "weights"))
        special: list[str] = []
        for part in PARTS:
            # Another core or layer has other settings.
            kin = [other for other in same_kind if other.get(f"{part}.name") == settings.get(f"{part}.name")]
            special += _differing(kin, lambda key, part=part: key.partition(".")[0] == part)  # type: ignore[misc]
        names = [str(settings.get(f"{part}.name", row.layer)) for part in differing]
        if mixed := settings.get("runs"):
            names = ["mixture of " + " + ".join(Path(folder).name for folder in mixed)]
        values = [f"{key.rpartition('.')[2]} {typed(settings.get(key))}" for key in (*special, *general)]
        ranks = row.runs[0].ranks
        if ranks and len({other.runs[0].ranks for other in rows} - {()}) > 1:  # mixtures have none
            values.append(f"ranks {' then '.join(map(str, ranks))}")
        # Runs that have little in common are told apart by the names that they were given.
        row.label = ", ".join([*names, *(values if len(values) <= MOST_VALUES else [row.runs[0].path.resolve().name])])
    for of_path in (lambda path: path.name, str):
        labels = [row.label for row in rows]
        for row in rows:
            if labels.count(row.label) > 1:
                row.label += f" ({of_path(row.runs[0].path)})"


def _as_asked(run: Run) -> dict[str, Any]:
    """The settings, without the cutoffs that were chosen automatically."""
    chosen = (run.summary or {}).get("output", {}).get("predicted")
    return run.settings | ({"output.cutoffs": "auto"} if chosen else {})


def _differing(all_settings: Sequence[dict[str, Any]], wanted: Callable[[str], bool]) -> list[str]:
    keys = dict.fromkeys(key for settings in all_settings for key in settings if wanted(key) and key not in IMMATERIAL)
    return [key for key in keys if len({repr(settings.get(key)) for settings in all_settings}) > 1]


def _identity(run: Run, *, only: str = "", without: str = "\0") -> frozenset[tuple[str, str]]:
    return frozenset(
        (key, repr(value))
        for key, value in run.settings.items()
        if key not in IMMATERIAL and key.startswith(only) and not key.startswith(without)
    )


def _beside_output(run: Run) -> Any:
    """What runs must share for their output layers' speeds to be compared."""
    return _identity(run, without="output."), run.ranks


def _corpus_name(run: Run) -> str:
    parts = [run.settings["data.name"], run.settings.get("data.language")]
    if folder := run.settings.get("data.dir"):
        parts.append(Path(str(folder)).name)
    if Row([run]).has_pieces:
        parts.append(f"sp{run.settings.get('data.vocab_size')}")
    return "-".join(re.sub(r"[^\w.-]+", "-", str(part))[:80] for part in parts if part)  # it names files
