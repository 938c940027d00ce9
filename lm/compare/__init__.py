"""Compare runs: a table, as text, Markdown, CSV and JSON, and plots.

python -m lm.compare runs/text8             all runs in a folder
python -m lm.compare runs/A runs/B          these
"""

import os
from collections.abc import Sequence
from pathlib import Path

from lm.compare.plots import can_plot, plot
from lm.compare.reading import find_runs, read_run
from lm.compare.rows import sections
from lm.compare.table import as_csv, as_markdown, as_records, as_text
from lm.console import say
from lm.errors import UserError
from lm.files import write_json, write_whole


def compare(paths: Sequence[Path], *, out: Path | None) -> None:
    """Print the table of all runs found and write it with the plots to `out`, by default beside the runs."""
    runs = [read_run(path) for path in find_runs(paths)]
    found = sections(runs)
    for section in found:
        say(as_text(section) + "\n")
    folder = out or Path(os.path.commonpath([run.path.parent for run in runs])) / "comparison"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        images = {section.name: plot(section, folder) for section in found} if can_plot() else {}
        _write_text(folder / "comparison.md", as_markdown(found, images=images))
        _write_text(folder / "comparison.csv", as_csv(found))
        write_json(folder / "comparison.json", as_records(found))
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}. Try --out FOLDER with another.") from None
    if not can_plot():
        say("There are no plots, because matplotlib is missing. Try pip install 'adaptive-lm[plots]'")
    say(f"The table{' and the plots are' if images else ' is'} in {folder}")


def _write_text(path: Path, text: str) -> None:
    write_whole(path, lambda file: file.write(text.encode()))
