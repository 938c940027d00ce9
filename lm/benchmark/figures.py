"""The paper's Figures 1 to 3, measured and predicted on this machine: their points, and how they are drawn."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from lm.benchmark.bench import HEAD_COVERAGE, Bench
from lm.output.clusters.block_timing import BlockTimer
from lm.output.clusters.choice import head_size
from lm.output.clusters.settings import Objective
from lm.system.errors import UserError
from lm.system.precision import Precision

LARGEST_BLOCK = 2000
"""Words of the largest product of Figure 1."""
MOST_CLUSTERS = 20
MEASURED_NUMBERS = (1, 2, 3, 5, 10, 20)
"""Numbers of tails at which Figure 3 is measured too."""


@dataclass(frozen=True)
class Curve:
    """Seconds against something."""

    label: str
    points: list[tuple[float, float]]
    line: bool = True
    """Drawn as a line; measurements are drawn as dots."""


@dataclass(frozen=True)
class Figure:
    """Curves with a common axis."""

    name: str
    title: str
    x_label: str
    curves: list[Curve]
    marks: dict[str, float] = field(default_factory=dict)
    """Vertical lines: what they mean, and where they stand."""
    logarithmic: bool = True


def need_matplotlib() -> None:
    """Refuse before anything is measured, rather than after."""
    if find_spec("matplotlib") is None:
        raise UserError(
            "the figures need matplotlib, which is missing. Try pip install 'adaptive-lm[plots]', or figures=false"
        )


def figures(bench: Bench) -> Iterator[Figure]:
    """Figures 1 to 3, one after the other, as each takes a while."""
    yield block_time(bench)
    yield two_clusters(bench)
    yield number_of_clusters(bench)


def block_time(bench: Bench) -> Figure:
    """Figure 1: a block's time against its words, flat at first, then affine."""
    timer = BlockTimer(bench.width, full_width=bench.width, device=torch.device("cpu"), precision=Precision.fp32)
    sizes = sorted({int(words) for words in np.geomspace(2, LARGEST_BLOCK, 14)})
    measured: list[tuple[float, float]] = [(words, timer.seconds(words, bench.tokens)) for words in sizes]
    head = bench.model.block(0)
    line = [(words, float(head.seconds(words, bench.tokens))) for words in np.geomspace(2, LARGEST_BLOCK, 100)]
    return Figure(
        "figure_1",
        f"Figure 1: a block of k words, {bench.tokens} tokens of width {bench.width}",
        "k, words of the block",
        [Curve("measured", measured, line=False), Curve("fitted model", line)],
    )


def two_clusters(bench: Bench) -> Figure:
    """Figure 2: a head and one tail, against the size of the head."""
    vocab_size = len(bench.counts)
    shares = bench.counts / bench.counts.sum()
    half = head_size(shares, coverage=0.5)
    least, most = max(1, min(half // 2, vocab_size // 500)), max(1, vocab_size // 3)
    sizes = sorted({int(words) for words in np.geomspace(least, most, 9)})
    seconds = bench.measure({str(words): [words] for words in sizes})
    line = sorted({int(words) for words in np.geomspace(least, most, 100)})
    best = min(line, key=lambda words: bench.predict([words]).seconds)
    return Figure(
        "figure_2",
        f"Figure 2: two clusters of {vocab_size:,} words, {bench.tokens} tokens of width {bench.width}",
        "words in the head",
        [
            Curve("measured", [(words, seconds[str(words)]) for words in sizes], line=False),
            Curve("predicted", [(words, bench.predict([words]).seconds) for words in line]),
            Curve("full softmax, predicted", [(words, bench.predict([words]).full_seconds) for words in (least, most)]),
        ],
        {
            "head and tail with half of the tokens each": half,
            f"head with {100 * HEAD_COVERAGE:.0f} %": head_size(shares, coverage=HEAD_COVERAGE),
            "least predicted time": best,
        },
    )


def number_of_clusters(bench: Bench) -> Figure:
    """Figure 3: the best clusters of either objective, against their number."""
    shares = bench.counts / bench.counts.sum()
    most = min(MOST_CLUSTERS, len(shares) - head_size(shares, coverage=HEAD_COVERAGE))
    as_built = {number: bench.choose(number) for number in range(1, most + 1)}
    paper = [(n, bench.choose(n, objective=Objective.paper).seconds) for n in as_built]
    seconds = bench.measure({str(n): as_built[n].cutoffs for n in MEASURED_NUMBERS if n <= most})
    return Figure(
        "figure_3",
        f"Figure 3: the best clusters of {len(shares):,} words, {bench.tokens} tokens of width {bench.width}",
        "J, number of tails",
        [
            Curve("paper's objective, predicted", [(float(n), s) for n, s in paper]),
            Curve("as built, predicted", [(float(n), choice.seconds) for n, choice in as_built.items()]),
            Curve("as built, measured", [(float(n), s) for n, s in seconds.items()], line=False),
        ],
        logarithmic=False,
    )


def draw(figure: Figure, path: Path) -> None:
    """The figure as a PNG."""
    # An image and nothing else: no window, no state that outlives the call.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

    canvas = Canvas(figsize=(8, 5.5), dpi=120, layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.add_subplot()
    for curve in figure.curves:
        x, seconds = zip(*curve.points, strict=True)
        axes.plot(x, [1e3 * s for s in seconds], "-" if curve.line else "o", label=curve.label)
    for (label, place), style in zip(figure.marks.items(), ("--", ":", "-."), strict=False):
        axes.axvline(place, color="grey", linestyle=style, label=f"{label} ({place:,})")
    if figure.logarithmic:
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
            axis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(title=figure.title, xlabel=figure.x_label, ylabel="forward and backward pass, ms")
    axes.grid(alpha=0.3)
    canvas.legend(loc="outside lower center", ncols=2)
    canvas.savefig(path)
