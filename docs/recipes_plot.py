"""Draw docs/recipes.svg: validation perplexity of the kept recipes against minutes, beside published results.

python docs/recipes_plot.py
"""

from pathlib import Path
from typing import Any

from lm.compare.plots import COLORS, MARKERS, label_logarithmic, new_plot
from lm.compare.run_records import read_runs

DOCS = Path(__file__).parent
PANELS = {
    "Europarl, Bulgarian": (
        {
            "europarl-bg/paper_recipe": "paper's recipe, LSTM-512",
            "europarl-bg/fast_5_epochs_wide": "europarl_fast, LSTM-1024",
            "europarl-bg/fast_18_minutes": "europarl_fast, LSTM-512",
        },
        {37: "paper, GPU: 37"},
    ),
    "WikiText-2": (
        {"wikitext2/wikitext2_awd": "wikitext2_awd, LSTM-640", "wikitext2/wikitext2_fast": "wikitext2_fast, LSTM-512"},
        {86.7: "tied LSTM-650, test: 86.7", 65.8: "AWD-LSTM, test: 65.8"},
    ),
}
"""Kept runs and published perplexities of each panel."""


def main() -> None:
    canvas, panels = new_plot(8.4, panels=2)
    for axes, (title, (runs, published)) in zip(panels, PANELS.items(), strict=True):
        for i, (folder, label) in enumerate(runs.items()):
            draw_run(axes, DOCS / "results" / folder, label=label, look=-1 - i)
        for perplexity, label in published.items():
            axes.axhline(perplexity, color="0.4", linestyle="--")
            below = {"xytext": (0, -3), "textcoords": "offset points", "va": "top"}
            axes.annotate(label, (0.17, perplexity), xycoords=("axes fraction", "data"), **below)
        axes.set(title=title, xlabel="training time, minutes", ylabel="validation perplexity", yscale="log")
        axes.set_xlim(left=0)
        axes.margins(y=0.15)
        label_logarithmic(axes.yaxis)
        axes.legend(frameon=False)
    canvas.savefig(DOCS / "recipes.svg")


def draw_run(axes: Any, folder: Path, *, label: str, look: int) -> None:
    """Draw a run's evaluations, and its test perplexity as a star."""
    (run,) = read_runs([folder])
    minutes = [evaluation.seconds / 60 for evaluation in run.evaluations]
    perplexities = [evaluation.perplexity for evaluation in run.evaluations]
    axes.plot(minutes, perplexities, color=COLORS[look], marker=MARKERS[look], label=label)
    axes.plot(minutes[-1], run.perplexity("test", "last"), color=COLORS[look], marker="*", markersize=12)


if __name__ == "__main__":
    main()
