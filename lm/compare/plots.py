"""Validation perplexity against training time (the paper's Figure 4) and against tokens, a point per evaluation."""

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lm.compare.paper import LAYERS
from lm.compare.rows import Row, Section
from lm.system.console import printable
from lm.system.files import write_whole

COLORS = ("#000000", "#E69F00", "#56B4E9", "#0072B2", "#CC79A7", "#009E73", "#D55E00")
"""Okabe and Ito's palette, which is safe for color-blind readers; the markers differ too."""
MARKERS = "os^vDPX"
STYLES = ("-", "--", ":", "-.")
LOGARITHMIC_FROM = 20
"""Use a logarithmic time axis if the longest run takes this many times as long as the shortest."""
UNITS = (("hours", 3600), ("minutes", 60), ("seconds", 1))
COUNTS = (("billions", 1e9), ("millions", 1e6), ("thousands", 1e3), ("", 1))
MAX_LABEL = 60
MAX_DIRECT_LABEL = 24
"""Write names up to this length beside the ends of their curves; longer ones would squeeze the plot."""
LABEL_GAP = 0.08
"""Distance between names beside the curves, as a fraction of the plot's height."""
WIDTH = 6
"""Inches. With letters of 13 points, legible on a phone, where plots are shown at two thirds of their size."""
KINDS = {"time": "training time", "tokens": "training tokens"}


def can_plot() -> bool:
    return find_spec("matplotlib") is not None


def plot(section: Section, folder: Path) -> list[str]:
    """Draw both plots as PNG and SVG; return the PNG file names."""
    names = []
    for kind in KINDS:
        canvas = draw(section, kind)
        if canvas is not None:
            stem = f"perplexity_by_{kind}-{section.name}"
            for ending in ("png", "svg"):
                write_whole(folder / f"{stem}.{ending}", partial(canvas.savefig, format=ending))
            names.append(f"{stem}.png")
    return names


def new_plot(height: float, *, panels: int = 1) -> tuple[Any, Any]:
    """Create a figure and axes, or an array of several below each other, without pyplot, so no window opens."""
    from matplotlib import rcParams
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rcParams.update({"font.size": 13, "axes.grid": True, "grid.alpha": 0.3})
    rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    canvas = Figure(figsize=(WIDTH, height), dpi=160, layout="constrained")
    FigureCanvasAgg(canvas)
    return canvas, canvas.subplots(panels)


def label_logarithmic(*axes: Any) -> None:
    """Format the ticks of logarithmic axes as plain numbers, the fewer the longer the axis."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    for axis in axes:
        low, high = axis.get_view_interval()
        few = (1,) if high > 300 * low else (1, 2, 5)
        axis.set_major_locator(LogLocator(subs=few if high > 8 * low else (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)))
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axis.set_minor_formatter(NullFormatter())


def draw(section: Section, kind: str) -> Any:
    """Draw one plot, or return None if no run has been evaluated yet."""
    rows = [row for row in section.rows if row.curve and row.runs[0].trained]
    if not rows:
        return None
    unit, scale = _unit(rows, kind)
    canvas, axes = new_plot(4.5)
    layers = [row.layer for row in rows]
    by_layer = len(set(layers)) == len(layers) and set(layers) <= set(LAYERS)
    for i, row in enumerate(rows):
        look = LAYERS.index(row.layer) if by_layer else i
        _draw_row(axes, row, kind=kind, scale=scale, look=look)
    ends = [_x(row.curve[-1][0], kind) for row in rows]
    if kind == "time":
        ends += _draw_paper(axes, rows, scale=scale)
    _dress(axes, logarithmic=max(ends) > LOGARITHMIC_FROM * max(min(ends), 1e-9))
    axes.set(
        title=section.name[:60],
        xlabel=f"{KINDS[kind]}, {unit}" if unit else KINDS[kind],
        ylabel="validation perplexity",
    )
    if max(len(line.get_label()) for line in axes.get_lines()) <= MAX_DIRECT_LABEL:
        label_ends(axes)
    else:
        canvas.set_figheight(4.5 + 0.22 * len(axes.get_lines()))
        canvas.legend(loc="outside lower center", frameon=False, fontsize="small")
    return canvas


def _draw_row(axes: Any, row: Row, *, kind: str, scale: float, look: int) -> None:
    """Draw a curve with a band over repetitions; `look` selects color and marker, then the line style."""
    means, lowest, highest = zip(*row.curve, strict=True)
    x = [_x(mean, kind) / scale for mean in means]
    color = COLORS[look % len(COLORS)]
    axes.plot(
        x,
        [mean.perplexity for mean in means],
        linestyle=STYLES[look // len(COLORS) % len(STYLES)],
        color=color,
        marker=MARKERS[(look + look // len(COLORS)) % len(MARKERS)],
        markersize=5,
        label=_for_plot(row.label) + ("" if row.finished else " (unfinished)"),
    )
    if len(row.runs) > 1:
        axes.fill_between(x, lowest, highest, color=color, alpha=0.2, linewidth=0)


def label_ends(axes: Any) -> None:
    """Name the curves to the right of the plot, from top to bottom, each linked to its last point."""
    axes.autoscale_view()
    to_axes = axes.transData + axes.transAxes.inverted()
    curves = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    ends = [to_axes.transform(line.get_xydata()[-1])[1] for line in curves]
    lowest_first = sorted(range(len(curves)), key=ends.__getitem__)
    place = -LABEL_GAP
    for rank, i in enumerate(lowest_first, 1):
        place = max(place + LABEL_GAP, ends[i])
        highest = 1 - LABEL_GAP * (len(curves) - rank)  # leaves room for the names above
        link = {"arrowstyle": "-", "color": curves[i].get_color(), "alpha": 0.6, "relpos": (0, 0.5)}
        where = {"xytext": (1.03, min(place, highest)), "textcoords": "axes fraction", "va": "center"}
        axes.annotate(curves[i].get_label(), curves[i].get_xydata()[-1], **where, arrowprops=link)


def _draw_paper(axes: Any, rows: list[Row], *, scale: float) -> list[float]:
    """Draw the paper's results as hollow stars; return their training times."""
    seconds: dict[str, float] = {}
    for row in rows:
        if row.paper and row.paper.minutes and row.layer not in seconds:
            place = 60 * row.paper.minutes
            label = "paper: 5 epochs\non a Maxwell GPU" if not seconds else None
            axes.plot(
                place / scale,
                row.paper.perplexity,
                marker="*",
                markersize=13,
                markerfacecolor="none",
                markeredgecolor=COLORS[LAYERS.index(row.layer)],
                linestyle="none",
                label=label,
            )
            seconds[row.layer] = place
    return list(seconds.values())


def _dress(axes: Any, *, logarithmic: bool) -> None:
    axes.set(yscale="log", xscale="log" if logarithmic else "linear")
    label_logarithmic(axes.yaxis)
    if logarithmic:
        label_logarithmic(axes.xaxis)
    else:
        axes.set_xlim(left=0)


def _x(evaluation: Any, kind: str) -> float:
    return float(evaluation.seconds if kind == "time" else evaluation.tokens)


def _unit(rows: list[Row], kind: str) -> tuple[str, float]:
    """Return the largest unit in which the longest run still measures at least 2 (1 for tokens)."""
    longest = max(_x(row.curve[-1][0], kind) for row in rows)
    units, least = (UNITS, 2) if kind == "time" else (COUNTS, 1)
    return next(((name, size) for name, size in units if longest >= least * size), units[-1])


def _for_plot(text: str) -> str:
    """Escape text so that matplotlib does not parse it as math."""
    return printable(text)[:MAX_LABEL].replace("$", r"\$")
