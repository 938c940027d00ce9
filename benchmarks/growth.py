"""Time and memory of output layers against the size of the vocabulary.

    python -m benchmarks.growth

Forward and backward pass of a layer on 20 x 128 tokens, with Zipf counts. The adaptive softmax has automatic cutoffs,
torch's has the fastest of the released ones. Plots are beside `--out`.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.harness import Record, interleaved_medians, numbers, peak_mib, report, run, sized_parser, zipf_counts
from benchmarks.workloads import RELEASED, TORCH_ADAPTIVE, Workload, layer_step
from lm.compare.plots import COLORS, MARKERS, label_ends, label_logarithmic, new_plot
from lm.system.console import say

LAYERS = {"full": 0, "sampled": 1, "hsm_freq": 2, TORCH_ADAPTIVE: 4, "adaptive": 6}
"""Colors as in comparisons of runs."""

MAX_FULL = 400_000
"""Words up to which the full softmax is measured; more need tens of GiB."""


def main(words: Sequence[str] | None = None) -> None:
    parser = sized_parser(__doc__, default="auto")
    parser.add_argument("--vocabularies", type=numbers, default="10000,25000,50000,100000,200000,400000,800000")
    parser.set_defaults(repeats=3)
    run(measure, parser, words)


def measure(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    workload = Workload.from_arguments(arguments)
    records = [record for size in arguments.vocabularies for record in grow(workload, size, repeats=arguments.repeats)]
    report(records, out=arguments.out)
    draw(records, Path(arguments.out).with_suffix(".svg"))


def grow(workload: Workload, vocab_size: int, *, repeats: int) -> Iterator[Record]:
    """Measure every layer at one size of the vocabulary."""
    workload = replace(workload, counts=zipf_counts(vocab_size))
    workload = replace(workload, cutoffs=workload.automatic_cutoffs())
    known = [cutoffs for cutoffs in RELEASED if cutoffs[-1] < vocab_size] or [[vocab_size // 5]]
    torch_steps = {str(c): layer_step(TORCH_ADAPTIVE, replace(workload, cutoffs=c)) for c in known}
    seconds = interleaved_medians(torch_steps, repeats=1, threads=workload.threads)
    chosen = min(known, key=lambda cutoffs: seconds[str(cutoffs)])
    layers = [name for name in LAYERS if name != "full" or vocab_size <= MAX_FULL]
    workloads = {name: replace(workload, cutoffs=chosen) if name == TORCH_ADAPTIVE else workload for name in layers}
    torch_steps.clear()
    steps = {name: layer_step(name, workloads[name]) for name in layers}
    seconds = interleaved_medians(steps, repeats=repeats, threads=workload.threads)
    steps.clear()
    for name in layers:
        mib = peak_mib(layer_step, name, workloads[name])
        yield {"layer": name, "words": vocab_size, "ms": 1e3 * seconds[name], "peak MiB": mib}


def draw(records: Sequence[Record], path: Path) -> None:
    """Plot time and memory below each other."""
    canvas, panels = new_plot(8.4, panels=2)
    for axes, column in zip(panels, ("ms", "peak MiB"), strict=True):
        for layer, i in LAYERS.items():
            points = [(r["words"] / 1000, r[column]) for r in records if r["layer"] == layer]
            axes.plot(*zip(*points, strict=True), color=COLORS[i], marker=MARKERS[i], label=layer)
        axes.set(xscale="log", yscale="log", xlabel="thousand words", title=f"{column}, output layer of a step")
        label_logarithmic(axes.xaxis, axes.yaxis)
        label_ends(axes)
    canvas.savefig(path)
    say(f"The plots are in {path}")


if __name__ == "__main__":
    main()
