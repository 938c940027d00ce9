"""`what=clusters`: the paper's Figures 1 to 3 on this machine, and how good the automatic choice of clusters is.

The comparison sets the automatic choice against a fixed set: heads that cover 75, 80, 85 and 90 % of the tokens, with
1, 2 and 3 tails whose cutoffs are in geometric progression, and `cutoffs`, if given. "Spearman" says how well the
predicted times order the measured ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from lm.benchmark.bench import HEAD_COVERAGE, Bench
from lm.benchmark.counts import CountsSettings
from lm.benchmark.figures import Figure, draw, figures, need_matplotlib
from lm.benchmark.rank_correlation import spearman
from lm.benchmark.rows import Row, write_rows
from lm.output.clusters.choice import head_size
from lm.output.clusters.cost_model import CostModel, measured_model
from lm.output.clusters.partition import check_cutoffs, projected_widths
from lm.system.console import say, table
from lm.system.precision import Precision

COVERAGES, NUMBERS = (HEAD_COVERAGE, 0.8, 0.85, 0.9), (1, 2, 3)
"""Of the fixed set: shares of the tokens in the head, numbers of tails."""
AUTOMATIC, GIVEN = "automatic", "given"


@dataclass
class ClustersSettings(CountsSettings):
    """Keys of `what=clusters`."""

    cutoffs: list[int] = field(default_factory=list)
    """Somebody's own choice, compared with the others: 2000,10000 is the authors' for Text8."""
    width: int = 512
    tokens: int = 2560
    """Tokens of a step: the paper's 128 streams of 20."""
    repeats: int = 3
    threads: int = 1
    compare: bool = True
    figures: bool = True
    """Draw Figures 1 to 3 beside `out`."""
    cost_models: str = "data/cost-models"
    """Folder in which measured cost models are kept."""
    out: str = "benchmark.json"


def run_clusters(settings: ClustersSettings) -> None:
    """Measure, print, draw, write."""
    if settings.figures:
        need_matplotlib()
    counts = settings.read_counts()
    check_cutoffs(settings.cutoffs, vocab_size=len(counts))
    torch.set_num_threads(settings.threads)
    bench = Bench(counts, settings.width, settings.tokens, settings.repeats, _cost_model(settings))
    rows: list[Row] = []
    if settings.compare:
        rows += compare(bench, given=settings.cutoffs)
    if settings.figures:
        for figure in figures(bench):
            path = Path(settings.out).with_suffix(f".{figure.name}.png")
            draw(figure, path)
            say(f"{figure.title}: {path}")
            rows += _points(figure, vocab_size=len(counts))
    write_rows(rows, settings.out)


def _cost_model(settings: ClustersSettings) -> CostModel:
    return measured_model(
        [settings.width, *projected_widths(settings.width, num_tails=3)],
        tokens=settings.tokens,
        device=torch.device("cpu"),
        precision=Precision.fp32,
        cache_dir=Path(settings.cost_models),
        notice=say,
    )


def compare(bench: Bench, *, given: list[int]) -> Iterator[Row]:
    """Predicted and measured times of the fixed set and of the automatic choice: printed, and as records."""
    choices = {
        f"{100 * coverage:.0f} %, {number}": fixed_choice(bench, coverage=coverage, num_tails=number)
        for coverage in COVERAGES
        for number in NUMBERS
    }
    if given:
        choices[GIVEN] = given
    choices[AUTOMATIC] = bench.choose().cutoffs
    predicted = {name: bench.predict(cutoffs).seconds for name, cutoffs in choices.items()}
    measured = bench.measure(choices)
    fastest = min((name for name in measured if name != AUTOMATIC), key=lambda name: measured[name])
    correlation = spearman(list(predicted.values()), list(measured.values()))
    lines = [
        [name, ",".join(map(str, cutoffs)), f"{1e3 * predicted[name]:.1f}", f"{1e3 * measured[name]:.1f}"]
        for name, cutoffs in choices.items()
    ]
    say(table(lines, header=["head, tails", "cutoffs", "predicted ms", "measured ms"]))
    say(
        f"Spearman {correlation:.3f}; automatic takes {measured[AUTOMATIC] / measured[fastest]:.3f} of the time of the "
        f"fastest ({fastest})" + (f", {measured[AUTOMATIC] / measured[GIVEN]:.3f} of the given's" if given else "")
    )
    base = f"clusters/{len(bench.counts)}"
    yield {"name": f"{base}/spearman", "value": correlation, "unit": "", "ratio": None}
    for name in choices:
        # `ratio` is the time in terms of the automatic choice's: below 1, and automatic was not the best.
        ratio, label = measured[name] / measured[AUTOMATIC], name.replace(" %, ", "_percent_")
        yield {"name": f"{base}/{label}/predicted", "value": 1e3 * predicted[name], "unit": "ms", "ratio": None}
        yield {"name": f"{base}/{label}/measured", "value": 1e3 * measured[name], "unit": "ms", "ratio": ratio}


def fixed_choice(bench: Bench, *, coverage: float, num_tails: int) -> list[int]:
    """A head of that coverage, the other cutoffs in geometric progression up to the vocabulary."""
    vocab_size = len(bench.counts)
    head = min(head_size(bench.counts / bench.counts.sum(), coverage=coverage), vocab_size - 1)
    cutoffs = np.geomspace(head, vocab_size, num_tails + 1)[:-1].round().astype(int)
    return sorted({int(cutoff) for cutoff in cutoffs if 0 < cutoff < vocab_size})


def _points(figure: Figure, *, vocab_size: int) -> Iterator[Row]:
    for curve in figure.curves:
        for x, seconds in curve.points:
            name = f"clusters/{vocab_size}/{figure.name}/{curve.label.replace(' ', '_')}/{x:g}"
            yield {"name": name, "value": 1e3 * seconds, "unit": "ms", "ratio": None}
