"""The paper's Figures 1 to 3, measured and predicted on this machine."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from lm.benchmark.candidates import Bench
from lm.benchmark.measure import Row, row
from lm.compare.plots import label_logarithmic, new_plot
from lm.output.clusters.block_timing import BlockTimer
from lm.output.clusters.settings import Objective
from lm.system.console import say
from lm.system.errors import UserError
from lm.system.precision import Precision

LARGEST_BLOCK = 2000
"""Words of the largest block in Figure 1."""
MOST_TAILS = 20
MEASURED_NUMBERS = (1, 2, 3, 5, 10, 20)
"""Numbers of tails at which Figure 3 is also measured."""


@dataclass(frozen=True)
class Curve:
    """Seconds against something; measurements are drawn as dots."""

    label: str
    points: list[tuple[float, float]]
    line: bool = True


@dataclass(frozen=True)
class Figure:
    """Curves with a common axis."""

    name: str
    title: str
    x_label: str
    curves: list[Curve]
    marks: dict[str, float] = field(default_factory=dict)
    """Vertical lines: label and position."""
    logarithmic: bool = True


def need_matplotlib() -> None:
    """Fail before anything is measured."""
    if find_spec("matplotlib") is None:
        raise UserError("the figures need matplotlib. Try pip install 'adaptive-lm[plots]', or figures=false")


def draw_all(bench: Bench, *, out: Path) -> Iterator[Row]:
    """Draw the figures beside `out`; their points."""
    for make in (block_time, two_clusters, number_of_clusters):
        figure = make(bench)
        path = out.with_suffix(f".{figure.name}.png")
        draw(figure, path)
        say(f"{figure.title}: {path}")
        for curve in figure.curves:
            base = f"clusters/{len(bench.counts)}/{figure.name}/{curve.label.replace(' ', '_')}"
            yield from (row(f"{base}/{x:g}", 1e3 * seconds, "ms") for x, seconds in curve.points)


def block_time(bench: Bench) -> Figure:
    """Figure 1: time of a block against its number of words; flat at first, then affine."""
    timer = BlockTimer(bench.width, full_width=bench.width, device=torch.device("cpu"), precision=Precision.fp32)
    head = bench.model.block(0)
    measured = [(float(words), timer.seconds(words, bench.tokens)) for words in _sizes(2, LARGEST_BLOCK, 14)]
    line = [(float(words), float(head.seconds(words, bench.tokens))) for words in np.geomspace(2, LARGEST_BLOCK, 100)]
    return Figure(
        "figure_1",
        f"Figure 1: a block of k words, {bench.tokens} tokens of width {bench.width}",
        "k, words of the block",
        [Curve("measured", measured, line=False), Curve("fitted model", line)],
    )


def two_clusters(bench: Bench) -> Figure:
    """Figure 2: a head and one tail, against the size of the head."""
    vocab_size, half = len(bench.counts), bench.head_size(0.5)
    least, most = max(1, min(half // 2, vocab_size // 500)), max(1, vocab_size // 3)
    sizes = _sizes(least, most, 9)
    measured = bench.measure({str(words): [words] for words in sizes})
    predicted = {words: bench.predict([words]) for words in _sizes(least, most, 100)}
    return Figure(
        "figure_2",
        f"Figure 2: two clusters of {vocab_size:,} words, {bench.tokens} tokens of width {bench.width}",
        "words in the head",
        [
            Curve("measured", [(words, measured[str(words)]) for words in sizes], line=False),
            Curve("predicted", [(words, choice.seconds) for words, choice in predicted.items()]),
            Curve("full softmax, predicted", [(words, predicted[words].full_seconds) for words in (least, most)]),
        ],
        {
            "head and tail with half of the tokens each": half,
            f"head with {100 * bench.head_coverage:.0f} %": bench.head_size(bench.head_coverage),
            "least predicted time": min(predicted, key=lambda words: predicted[words].seconds),
        },
    )


def number_of_clusters(bench: Bench) -> Figure:
    """Figure 3: the best clusters of each objective, against the number of tails."""
    vocab_size = len(bench.counts)
    most = min(MOST_TAILS, vocab_size - bench.head_size(bench.head_coverage))
    as_built = {number: bench.choose(number) for number in range(1, most + 1)}
    paper = [(float(n), bench.choose(n, objective=Objective.paper).seconds) for n in as_built]
    measured = bench.measure({str(n): as_built[n].cutoffs for n in MEASURED_NUMBERS if n <= most})
    return Figure(
        "figure_3",
        f"Figure 3: the best clusters of {vocab_size:,} words, {bench.tokens} tokens of width {bench.width}",
        "J, number of tails",
        [
            Curve("paper's objective, predicted", paper),
            Curve("as built, predicted", [(float(n), choice.seconds) for n, choice in as_built.items()]),
            Curve("as built, measured", [(float(n), seconds) for n, seconds in measured.items()], line=False),
        ],
        logarithmic=False,
    )


def _sizes(least: int, most: int, num: int) -> list[int]:
    """Whole numbers in geometric progression."""
    return sorted({least, most, *(int(words) for words in np.geomspace(least, most, num))})


def draw(figure: Figure, path: Path) -> None:
    """Write the figure as a PNG."""
    from matplotlib.ticker import MaxNLocator

    canvas, axes = new_plot(8, 5.5)
    for curve in figure.curves:
        x, seconds = zip(*curve.points, strict=True)
        axes.plot(x, [1e3 * s for s in seconds], "-" if curve.line else "o", label=curve.label)
    for (label, place), style in zip(figure.marks.items(), ("--", ":", "-."), strict=False):
        axes.axvline(place, color="grey", linestyle=style, label=f"{label} ({place:,})")
    if figure.logarithmic:
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            label_logarithmic(axis)
    else:
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(title=figure.title, xlabel=figure.x_label, ylabel="forward and backward pass, ms")
    canvas.legend(loc="outside lower center", ncols=2)
    canvas.savefig(path)
