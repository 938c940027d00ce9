"""Console output: notices, tables, progress (a bar on a terminal, plain lines elsewhere)."""

import contextlib
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from lm.system.interrupt import in_sweep

LINE_SECONDS = 10.0
"""Seconds between plain progress lines."""


def printable(text: object, *, keep: str = "") -> str:
    """Escape control characters, so that no corpus or path can control the terminal."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def say(text: str = "", *, to: TextIO | None = None) -> None:
    """Print a notice to stdout or `to`, above any progress bar."""
    _write(text, to or sys.stdout)
    if to is None:
        for file in _TRANSCRIPTS:
            _write(text, file)


def _write(text: str, to: TextIO) -> None:
    tqdm.write(printable(text, keep="\n"), file=to)
    to.flush()


_TRANSCRIPTS: list[TextIO] = []


@contextlib.contextmanager
def transcript(path: Path) -> Iterator[None]:
    """Also append everything `say` prints to a file."""
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        _TRANSCRIPTS.append(file)
        try:
            yield
        finally:
            _TRANSCRIPTS.remove(file)


def table(rows: Sequence[Sequence[object]], *, header: Sequence[str]) -> str:
    """Format a table with aligned columns and right-aligned numbers."""
    text = [[printable(cell) for cell in row] for row in [header, *rows]]
    columns = []
    for cells in zip(*text, strict=True):
        width = max(map(len, cells))
        numeric = all(cell in ("", "-", "NA") or cell.lstrip("-")[:1].isdigit() for cell in cells[1:])
        lines = [cells[0], "-" * width, *cells[1:]]
        columns.append([line.rjust(width) if numeric else line.ljust(width) for line in lines])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def markdown_table(rows: Sequence[Sequence[object]], *, header: Sequence[str]) -> str:
    """Format a Markdown table; the first column is left-aligned, the others right-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(printable(c).replace("|", "\\|") for c in line) + " |" for line in lines)


def python_command() -> str:
    """Return how to call this Python in the user's shell: by name if it is on PATH, else by path."""
    if Path(shutil.which("python") or "").absolute() == Path(sys.executable).absolute():
        return "python"
    with contextlib.suppress(ValueError):
        return str(Path(sys.executable).relative_to(Path.cwd()))
    return sys.executable


PROGRAM = "adaptive-lm"
"""The installed console command."""


def own_command(name: str) -> str:
    """Return how the user starts a command: with `adaptive-lm` if it started this one, else with Python."""
    if sys.argv[0] == PROGRAM:
        return f"{PROGRAM} {name}"
    return f"{python_command()} {f'{name}.py' if name in ('train', 'evaluate') else f'-m lm.{name}'}"


def duration(seconds: float) -> str:
    """Format seconds as 45s, 3m20s, 2h05m or 3d04h."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def counted(number: int, noun: str) -> str:
    """Format a count with its noun: 1 line, 1,200 lines."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def byte_size(count: int) -> str:
    """Format bytes as 512 B, 31.3 MB or 1.8 GB."""
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.95 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Shows progress and the latest metrics: a bar on a terminal, otherwise a line every few seconds."""

    def __init__(self, total: int | None, *, start: int = 0, label: str, unit: str, to: TextIO | None = None) -> None:
        self.total, self.label, self.unit, self.to = total, label, unit, to or sys.stdout
        self.start = self.count = start
        self.metrics: dict[str, str] = {}
        self.began = self.last_line = time.monotonic()
        self.bar = tqdm(
            total=total,
            initial=start,
            desc=label,
            unit=unit,
            unit_scale=unit in ("B", "tokens"),
            dynamic_ncols=True,
            leave=False,
            disable=not self.to.isatty(),
        )

    def advance(self, amount: int = 1) -> None:
        self.count += amount
        self.bar.update(amount)
        if self.bar.disable and time.monotonic() - self.last_line >= LINE_SECONDS:
            self.line()

    def show(self, **metrics: str) -> None:
        """Replace the metrics beside the bar."""
        self.metrics = metrics
        self.bar.set_postfix(metrics, refresh=False)

    def line(self) -> None:
        """Print a plain line."""
        self.last_line = time.monotonic()
        amount, unit = (byte_size, "") if self.unit == "B" else (str, f" {self.unit}")
        total = f"/{amount(self.total)}" if self.total else ""
        metrics = "".join(f"  {name} {value}" for name, value in self.metrics.items())
        eta = self.remaining()
        eta_text = f"  ETA {duration(eta)}" if eta else ""
        _write(f"{self.label} {amount(self.count)}{total}{unit}{metrics}{eta_text}", self.to)

    def remaining(self) -> float | None:
        """Estimated seconds to the end."""
        done = self.count - self.start
        if not self.total or done <= 0:
            return None
        return (time.monotonic() - self.began) / done * (self.total - self.count)

    def __exit__(self, *_: object) -> None:
        self.bar.close()


def next_steps(run: Path, *more: str) -> list[str]:
    """Return lines that suggest commands for a finished run; empty inside a sweep."""
    if in_sweep():
        return []
    commands = [
        f"{python_command()} -m tensorboard.main --logdir {shlex.quote(str(run.parent))}",
        f"{own_command('evaluate')} {shlex.quote(f'checkpoint={run}')}",
        f"{own_command('generate')} {shlex.quote(f'checkpoint={run}')}",
        *more,
    ]
    return ["", "Next:", *(f"  {command}" for command in commands)]


def resume_command(run: Path) -> str:
    return f"{own_command('train')} {shlex.quote(f'resume={run}')}"
