"""From runs to the rows of a comparison: a section per corpus, a row per layer, seeds merged."""

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lm.compare.paper import LAYERS, PaperFigures, published
from lm.config.commands import TrainConfig
from lm.config.validate import may_change, typed
from lm.runs.reading import Evaluation, Run

BEARS_ON_FIGURES = {
    f"trainer.{key}" for key in ("max_epochs", "max_steps", "max_tokens", "max_seconds", "device", "threads", "profile")
}
IMMATERIAL = {"seed", "data.root", "data.archive", "output.cost_model", *may_change(TrainConfig)} - BEARS_ON_FIGURES
"""Settings in which two runs may differ and still be repetitions of each other."""


@dataclass(frozen=True)
class Figure:
    """A figure over the repetitions of a run: their mean, and their standard deviation where there are several."""

    mean: float
    spread: float | None


@dataclass
class Row:
    """Runs that differ in nothing but their seed."""

    runs: list[Run]
    label: str = ""
    speed_up: float | None = None
    """Tokens per second over those of the full softmax with the same settings."""

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
        return published(self.settings)

    @property
    def parameters(self) -> int | None:
        run = self.runs[0]
        found = [run.summary["parameters"]] if run.summary else run.figures("parameters")
        return int(found[0]) if found else None

    @property
    def epochs(self) -> float:
        return float(min(run.records[-1]["epoch"] for run in self.runs))

    def valid(self, which: str) -> Figure | None:
        """The `last` or the `best` validation perplexity."""
        pick: Callable[[list[float]], float] = min if which == "best" else lambda values: values[-1]
        return _figure(pick([e.perplexity for e in r.evaluations]) if r.evaluations else None for r in self.runs)

    def test(self, which: str) -> Figure | None:
        return _figure(run.summary["test"].get(which) if run.summary else None for run in self.runs)

    @property
    def per_known_word(self) -> Figure | None:
        """The last test perplexity of the words that a vocabulary of words holds, whatever the model predicts."""
        return _figure((run.summary or {}).get("test_without_unk", {}).get("last") for run in self.runs)

    @property
    def has_pieces(self) -> bool:
        """Whether its perplexities are of pieces of words."""
        return self.settings.get("data.tokenizer") == "sentencepiece"

    @property
    def minutes(self) -> Figure | None:
        return _figure(run.records[-1]["train_seconds"] / 60 for run in self.runs)

    @property
    def tokens_per_second(self) -> Figure | None:
        return _figure(run.tokens_per_second for run in self.runs)

    @property
    def peak_gib(self) -> Figure | None:
        return _figure(max(run.figures("memory/peak_gib"), default=None) for run in self.runs)

    @cached_property
    def curve(self) -> list[tuple[Evaluation, float, float]]:
        """The mean of the repetitions at each step that all of them evaluated; lowest and highest perplexity."""
        by_step = [{e.step: e for e in run.evaluations} for run in self.runs]
        shared = [step for step in by_step[0] if all(step in steps for steps in by_step)]
        points = []
        for step in shared:
            at = [steps[step] for steps in by_step]
            mean = Evaluation(
                step=step,
                tokens=at[0].tokens,
                seconds=statistics.fmean(e.seconds for e in at),
                perplexity=statistics.fmean(e.perplexity for e in at),
                ends_epoch=at[0].ends_epoch,
            )
            points.append((mean, min(e.perplexity for e in at), max(e.perplexity for e in at)))
        return points


@dataclass
class Section:
    """The rows of one corpus, whose perplexities can be compared."""

    name: str
    rows: list[Row]
    beside_pieces: bool = False
    """Whether runs on pieces of words are in the comparison."""

    @property
    def has_repetitions(self) -> bool:
        return any(len(row.runs) > 1 for row in self.rows)

    @property
    def has_paper(self) -> bool:
        return any(row.paper for row in self.rows)


def sections(runs: Sequence[Run]) -> list[Section]:
    """The runs in their corpora, merged, labelled and in the paper's order."""
    by_corpus: dict[Any, list[Run]] = defaultdict(list)
    for run in runs:
        by_corpus[_identity(run, only="data.")].append(run)
    found: dict[str, Section] = {}
    for members in by_corpus.values():
        name = base = _corpus_name(members[0])
        number = 1
        while name in found:  # the same corpus, cut into words by other rules
            number += 1
            name = f"{base}-{number}"
        found[name] = Section(name, _rows(members))
    with_pieces = any(row.has_pieces for section in found.values() for row in section.rows)
    return [replace(section, beside_pieces=with_pieces) for section in found.values()]


def _rows(runs: Sequence[Run]) -> list[Row]:
    merged: dict[Any, Row] = {}
    for run in runs:
        # Runs that are under way stand at different places, so each is a row of its own.
        merged.setdefault((_identity(run), run.finished or run.path), Row([])).runs.append(run)
    rows = sorted(merged.values(), key=lambda row: LAYERS.index(row.layer) if row.layer in LAYERS else len(LAYERS))
    _label(rows)
    full = {_identity(row.runs[0], without="output."): row for row in reversed(rows) if row.layer == "full"}
    for row in rows:
        base = full.get(_identity(row.runs[0], without="output."))
        ours, theirs = row.tokens_per_second, base.tokens_per_second if base else None
        row.speed_up = ours.mean / theirs.mean if ours and theirs else None
    return rows


def _label(rows: Sequence[Row]) -> None:
    """Name each row by its layer, and by those settings that tell it from others."""
    general = _differing([row.settings for row in rows], lambda key: not key.startswith("output."))
    for row in rows:
        kin = [other.settings for other in rows if other.layer == row.layer]
        special = _differing(kin, lambda key: key.startswith("output."))
        told = [f"{key.rpartition('.')[2]} {typed(row.settings.get(key))}" for key in (*special, *general)]
        row.label = ", ".join([row.layer, *told])
    labels = [row.label for row in rows]
    for row in rows:
        if labels.count(row.label) > 1:
            row.label += f" ({row.runs[0].path.name})"


def _differing(all_settings: Sequence[dict[str, Any]], wanted: Callable[[str], bool]) -> list[str]:
    keys = dict.fromkeys(key for settings in all_settings for key in settings if wanted(key) and key not in IMMATERIAL)
    return [key for key in keys if len({repr(settings.get(key)) for settings in all_settings}) > 1]


def _identity(run: Run, *, only: str = "", without: str = "\0") -> frozenset[tuple[str, str]]:
    return frozenset(
        (key, repr(value))
        for key, value in run.settings.items()
        if key not in IMMATERIAL and key.startswith(only) and not key.startswith(without)
    )


def _corpus_name(run: Run) -> str:
    parts = [run.settings["data.name"], run.settings.get("data.language")]
    if folder := run.settings.get("data.dir"):
        parts.append(Path(str(folder)).name)
    if Row([run]).has_pieces:
        parts.append(f"sp{run.settings['data.vocab_size']}")
    return "-".join(re.sub(r"[^\w.-]+", "-", str(part)) for part in parts if part)


def _figure(values: Iterable[float | None]) -> Figure | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Figure(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)
