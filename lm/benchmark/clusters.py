"""`what=clusters`: how good the automatic cutoffs are, and the paper's Figures 1 to 3 on this machine.

The automatic choice is compared with a fixed set: heads that cover 60, 70, 80 and 90 % of the tokens, with 1, 2 and 3
tails whose cutoffs grow geometrically; and with `cutoffs`, if given. "Spearman" is the rank correlation of predicted
and measured times.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from lm.benchmark import figures
from lm.benchmark.arguments import CountsSettings, fill
from lm.benchmark.candidates import Bench, Workload
from lm.benchmark.measure import Row, row, write_rows
from lm.system.console import say, table

COVERAGES, NUM_TAILS = (0.6, 0.7, 0.8, 0.9), (1, 2, 3)
AUTOMATIC, GIVEN = "automatic", "given"


@dataclass
class ClustersSettings(CountsSettings):
    """Keys of `what=clusters`."""

    cutoffs: list[int] = field(default_factory=list)
    """Your own choice, compared with the others; the authors' for Text8 is 2000,10000."""
    tokens: int = 2560
    """Tokens per step: the paper's 128 streams of 20."""
    repeats: int = 3
    threads: int = 1
    compare: bool = True
    figures: bool = True
    """Draw Figures 1 to 3 beside `out`."""
    cost_models: str = "data/cost-models"
    """Folder of measured cost models."""


def main(pairs: dict[str, str]) -> None:
    settings = fill(ClustersSettings, pairs)
    if settings.figures:
        figures.need_matplotlib()
    counts = settings.read_counts()
    torch.set_num_threads(settings.threads)
    sizes = Workload(counts, settings.cutoffs, settings.width, settings.tokens)
    bench = Bench.measured(sizes, repeats=settings.repeats, cache_dir=Path(settings.cost_models))
    rows = list(compare(bench, given=settings.cutoffs)) if settings.compare else []
    if settings.figures:
        rows += figures.draw_all(bench, out=Path(settings.out))
    write_rows(rows, settings.out)


def compare(bench: Bench, *, given: list[int]) -> Iterator[Row]:
    """Predicted and measured times of the fixed set and of the automatic choice; prints them too.

    `ratio` is the measured time relative to the automatic choice's; below 1 a fixed choice was faster.
    """
    choices = {
        f"{100 * coverage:.0f} %, {number}": fixed_choice(bench, coverage=coverage, num_tails=number)
        for coverage in COVERAGES
        for number in NUM_TAILS
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
    against_given = f" and {measured[AUTOMATIC] / measured[GIVEN]:.3f} x the given cutoffs'" if given else ""
    say(
        f"Spearman {correlation:.3f}; the automatic choice takes {measured[AUTOMATIC] / measured[fastest]:.3f} x the "
        f"time of the fastest ({fastest}){against_given}"
    )
    base = f"clusters/{len(bench.counts)}"
    yield row(f"{base}/spearman", correlation, "")
    for name in choices:
        label = name.replace(" %, ", "_percent_")
        yield row(f"{base}/{label}/predicted", 1e3 * predicted[name], "ms")
        yield row(f"{base}/{label}/measured", 1e3 * measured[name], "ms", measured[name] / measured[AUTOMATIC])


def fixed_choice(bench: Bench, *, coverage: float, num_tails: int) -> list[int]:
    """A head of that coverage; the other cutoffs grow geometrically up to the vocabulary."""
    vocab_size = len(bench.counts)
    cutoffs = np.geomspace(min(bench.head_size(coverage), vocab_size - 1), vocab_size, num_tails + 1)[:-1]
    return sorted({int(cutoff) for cutoff in cutoffs.round() if 0 < cutoff < vocab_size})


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's rank correlation, from -1 to 1; nan if either is constant."""
    a, b = (ranks(values) - (len(values) - 1) / 2 for values in (one, other))
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale else float("nan")


def ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Ranks from 0; equal values share their mean rank."""
    _, group, sizes = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    middle: NDArray[np.float64] = np.cumsum(sizes) - (sizes + 1) / 2
    return middle[group]
