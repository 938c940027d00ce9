"""Automatic cutoffs compared with fixed ones, and the paper's Figures 1 to 3 on this machine.

    python -m benchmarks.clusters --counts FILE --cutoffs 2000,10000

The fixed ones have the head and the number of tails of the automatic ones, and a grid of sizes for the tails; the best
choices with other numbers of tails, and `--cutoffs`, if given, are measured too. "x automatic": measured time relative
to the automatic choice. "Spearman" is the rank correlation of predicted and measured times. The figures are written
beside `--out`; `--no-figures` leaves them out.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, count
from math import comb
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import Record, Step, interleaved_medians, print_records, run, sized_parser
from benchmarks.workloads import Workload, layer_step, shipped
from lm.compare.plots import COLORS, can_plot, label_ends, label_logarithmic, new_plot
from lm.output.clusters.choice import ClusterCosts, head_size
from lm.output.clusters.cost_model import BlockTimer, CostModel, measured_model
from lm.output.clusters.partition import projected_widths
from lm.system.console import say
from lm.system.errors import UserError
from lm.system.files import write_json

GRID = 20
"""Number of fixed choices."""
MEASURED_TAILS = (1, 2, 3, 5, 10, 20)
"""Numbers of tails in Figure 3; all numbers up to the last are predicted."""
Timer = Callable[[Mapping[str, Step]], dict[str, float]]
"""Times steps by name, in seconds."""
Points = list[tuple[float, float]]
"""Position on the x-axis, seconds."""


def main(words: Sequence[str] | None = None) -> None:
    parser = sized_parser(__doc__, default="")
    parser.add_argument("--no-figures", dest="figures", action="store_false", help="only compare cutoffs")
    parser.set_defaults(repeats=3)
    run(measure, parser, words)


def measure(arguments: argparse.Namespace) -> None:
    if arguments.figures and not can_plot():
        raise UserError("The figures need matplotlib. Try pip install matplotlib.")
    workload = Workload.from_arguments(arguments)
    torch.set_num_threads(arguments.threads)
    timer = partial(interleaved_medians, repeats=arguments.repeats, threads=arguments.threads)
    bench = Bench.of(workload, timer=timer, cache=Path("data/cost-models"))
    records = list(compare(bench))
    print_records(records)
    records += draw_figures(bench, out=Path(arguments.out)) if arguments.figures else []
    write_json(Path(arguments.out), records)


@dataclass(frozen=True)
class Bench:
    """Measured and predicted times of the adaptive softmax with different cutoffs."""

    workload: Workload
    costs: ClusterCosts
    timer: Timer

    @classmethod
    def of(cls, workload: Workload, *, timer: Timer, cache: Path) -> "Bench":
        """Create with this machine's cost model, measured now or earlier."""
        widths = [workload.width, *projected_widths(workload.width, num_tails=3)]
        precision = workload.config.trainer.precision
        model = measured_model(widths, workload.tokens, workload.device, precision, cache_dir=cache)
        coverage = shipped("output", "adaptive").head_coverage
        return cls(workload, ClusterCosts(workload.counts, workload.width, workload.tokens, model, coverage), timer)

    def measure(self, choices: Mapping[str, Sequence[int]]) -> dict[str, float]:
        """Seconds per training step of the adaptive softmax with each of these cutoffs."""
        return self.timer(
            {name: layer_step("adaptive", replace(self.workload, cutoffs=list(c))) for name, c in choices.items()}
        )

    def head_size(self, coverage: float) -> int:
        """Count the most frequent words that cover this share of the tokens."""
        return head_size(self.workload.counts / self.workload.counts.sum(), coverage=coverage)


def compare(bench: Bench) -> Iterator[Record]:
    """Predicted and measured times of the fixed cutoffs and of the automatic ones."""
    automatic = bench.costs.choose().cutoffs
    choices = {f"fixed {i}": cutoffs for i, cutoffs in enumerate(fixed_choices(automatic, bench), 1)}
    others = {n: bench.costs.choose(n).cutoffs for n in (2, 3) if n != len(automatic)}
    choices |= {f"best with {n} tails": cutoffs for n, cutoffs in others.items()}
    if bench.workload.cutoffs:
        choices["given"] = bench.workload.cutoffs
    choices["automatic"] = automatic
    predicted = {name: bench.costs.predict(cutoffs).seconds for name, cutoffs in choices.items()}
    measured = bench.measure(choices)
    fastest = min(seconds for name, seconds in measured.items() if name.startswith("fixed"))
    say(
        f"Spearman {spearman(list(predicted.values()), list(measured.values())):.3f}; the automatic choice needs "
        f"{measured['automatic'] / fastest:.3f} x the time of the fastest fixed one"
    )
    for name, cutoffs in choices.items():
        yield {
            "clusters": name,
            "cutoffs": ",".join(map(str, cutoffs)),
            "predicted ms": 1e3 * predicted[name],
            "measured ms": 1e3 * measured[name],
            "x automatic": measured[name] / measured["automatic"],
        }


def fixed_choices(automatic: Sequence[int], bench: Bench) -> list[list[int]]:
    """Return up to GRID choices with the same head, whose other cutoffs lie on a geometric grid."""
    head, *others = automatic
    levels = next(n for n in count(len(others)) if comb(n, len(others)) >= GRID or not others)
    grid = _sizes(head, len(bench.workload.counts), levels + 2)[1:-1]
    return [[head, *chosen] for chosen in combinations(grid, len(others))][:GRID]


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's rank correlation, from -1 to 1."""
    ranks, others = (np.argsort(np.argsort(values, kind="stable")) for values in (one, other))
    return float(np.corrcoef(ranks, others)[0, 1])


def draw_figures(bench: Bench, *, out: Path) -> Iterator[Record]:
    """Draw Figures 1 to 3 beside `out`; yields their points."""
    figures = [
        ("Figure 1: time of a block", "words of the block", block_time(bench)),
        ("Figure 2: a head and one tail", "words in the head", two_clusters(bench)),
        ("Figure 3: best clusters", "number of tails", num_clusters(bench)),
    ]
    for i, (title, x_label, curves) in enumerate(figures, 1):
        canvas, axes = new_plot(4.5)
        for (label, points), color in zip(curves.items(), (COLORS[0], COLORS[6], COLORS[3]), strict=False):
            x, ms = zip(*((x, 1e3 * seconds) for x, seconds in points), strict=True)
            axes.loglog(x, ms, "o" if label == "measured" else "-", color=color, label=label)
            yield from ({"clusters": f"figure_{i}: {label}", "x": x, "measured ms": 1e3 * s} for x, s in points)
        axes.set(title=f"{title}\n{misses(curves)}", xlabel=x_label, ylabel="forward and backward pass, ms")
        label_logarithmic(axes.xaxis, axes.yaxis)
        label_ends(axes)
        canvas.savefig(path := out.with_suffix(f".figure_{i}.svg"))
        say(f"{axes.get_title()}\n{path}")


def misses(curves: Mapping[str, Points]) -> str:
    """Say how far the predictions are from the measured points: on average, and where most."""
    x, seconds = np.array(curves["measured"]).T
    errors = np.interp(x, *np.array(curves["predicted"]).T) / seconds - 1
    worst, average = np.abs(errors).argmax(), np.abs(errors).mean()
    return f"prediction {average:.0%} off; {errors[worst]:+.0%} at {x[worst]:,.0f}"


def block_time(bench: Bench) -> dict[str, Points]:
    """Figure 1: time of a block against its number of words; flat at first, then affine."""
    width, tokens, precision = bench.workload.width, bench.workload.tokens, bench.workload.config.trainer.precision
    timer = BlockTimer(width, full_width=width, device=bench.workload.device, precision=precision)
    head = bench.costs.model.block(0)
    return {
        "measured": [(words, timer.seconds(words, tokens)) for words in _sizes(2, 2000, 14)],
        "predicted": [(words, head.seconds(words, tokens)) for words in _sizes(2, 2000, 100)],
    }


def two_clusters(bench: Bench) -> dict[str, Points]:
    """Figure 2: a head and one tail, against the size of the head."""
    vocab_size, half = len(bench.workload.counts), bench.head_size(0.5)
    low, high = max(1, min(half // 2, vocab_size // 500)), max(1, vocab_size // 3)
    measured = bench.measure({str(words): [words] for words in _sizes(low, high, 9)})
    predicted = {words: bench.costs.predict([words]) for words in _sizes(low, high, 100)}
    return {
        "measured": [(int(words), seconds) for words, seconds in measured.items()],
        "predicted": [(words, choice.seconds) for words, choice in predicted.items()],
        "full softmax": [(words, predicted[words].full_seconds) for words in (low, high)],
    }


def num_clusters(bench: Bench) -> dict[str, Points]:
    """Figure 3: the best clusters of each objective, against the number of tails."""
    costs = bench.costs
    max_tails = min(MEASURED_TAILS[-1], len(bench.workload.counts) - bench.head_size(costs.head_coverage))
    as_built = {tails: costs.choose(tails) for tails in range(1, max_tails + 1)}
    measured = bench.measure({str(n): as_built[n].cutoffs for n in MEASURED_TAILS if n <= max_tails})
    # The paper's objective: all clusters are as wide as the head, which may be of any size.
    paper = replace(costs, model=CostModel("", costs.model.blocks[:1]), head_coverage=0.0)
    return {
        "measured": [(int(n), seconds) for n, seconds in measured.items()],
        "predicted": [(n, choice.seconds) for n, choice in as_built.items()],
        "paper's objective": [(n, paper.choose(n).seconds) for n in as_built],
    }


def _sizes(low: int, high: int, count: int) -> list[int]:
    """Return integers in geometric progression."""
    return sorted({low, high, *(int(words) for words in np.geomspace(low, high, count))})


if __name__ == "__main__":
    main()
