"""Compare runs: a table, as text, Markdown, LaTeX, CSV and JSON, and plots.

python -m lm.compare runs/text8             all runs in a folder
python -m lm.compare runs/A runs/B          two runs
python -m lm.compare runs --keep results    also copy their metrics, small enough to commit
"""

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path

from lm.compare.keep import keep
from lm.compare.plots import can_plot, plot
from lm.compare.rows import sections
from lm.compare.run_records import has_metrics, read_runs
from lm.compare.table import Column, as_csv, as_latex, as_markdown, as_records, as_text
from lm.system.console import counted, next_steps, say
from lm.system.errors import UserError
from lm.system.files import exclusive, write_json, write_text


def compare(
    paths: Sequence[Path], *, out: Path | None, kept_in: Path | None = None, columns: Sequence[Column] = ()
) -> None:
    """Print a table of all runs; write it and the plots to `out`, by default next to the runs."""
    runs = read_runs(paths)
    by_corpus = sections(runs)
    for section in by_corpus:
        say(as_text(section, columns) + "\n")
    folder = out or _home(paths, {run.path.resolve() for run in runs})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive(folder / ".lock", waiting_for=f"the comparison in {folder}"):
            images = {section.name: plot(section, folder) for section in by_corpus} if can_plot() else {}
            write_text(folder / "comparison.md", as_markdown(by_corpus, columns, images=images))
            write_text(folder / "comparison.tex", as_latex(by_corpus, columns))
            write_text(folder / "comparison.csv", as_csv(by_corpus))
            write_json(folder / "comparison.json", as_records(by_corpus))
        if kept_in is not None:
            keep(runs, kept_in)
    except OSError as error:
        reason = f"{error.filename or folder} cannot be written: {error.strerror}"
        raise UserError(f"{reason}. Try another folder with --out or --keep.") from None
    if not can_plot():
        say("No plots, because matplotlib is not installed. Try pip install matplotlib.")
    say(f"The table{' and the plots are' if images else ' is'} in {folder}")
    if kept_in is not None:
        say(f"The metrics of {counted(len(runs), 'run')} are in {kept_in}")


def compare_sweep(folder: Path) -> None:
    """Compare a sweep's runs if any has results, and suggest commands for the best one."""
    if not folder.is_dir() or not any(has_metrics(file.parent) for file in folder.rglob("config.yaml")):
        return
    compare([folder], out=None)
    finished = [run for run in read_runs([folder]) if run.perplexity("valid", "last") is not None]
    if finished:
        best = min(finished, key=lambda run: run.perplexity("valid", "last") or math.inf)
        say("\n".join(next_steps(best.path)))


def _home(paths: Sequence[Path], runs: set[Path]) -> Path:
    """Return `comparison` in the folder that contains all the runs, or in the current folder if none does."""
    given = [path.resolve() for path in paths]
    homes = {path.parent if path in runs else path for path in given}
    home = homes.pop() if len(homes) == 1 else Path.cwd()
    with contextlib.suppress(ValueError):
        home = home.relative_to(Path.cwd())
    return home / "comparison"
