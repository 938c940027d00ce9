"""What a person sees: progress, tables, notices. A bar on a terminal, plain lines elsewhere."""

import contextlib
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from tqdm import tqdm


def printable(text: object, *, keep: str = "") -> str:
    """Text with its control characters escaped, so that no corpus and no path can steer the terminal."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def say(text: str = "", *, to: TextIO | None = None) -> None:
    """Print one notice, by default on stdout; a progress bar moves out of its way."""
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
    """Append what `say` prints on stdout to a file, too."""
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        _TRANSCRIPTS.append(file)
        try:
            yield
        finally:
            _TRANSCRIPTS.remove(file)


def table(rows: Sequence[Sequence[object]], *, header: Sequence[str]) -> str:
    """Columns aligned, numbers to the right."""
    text = [[printable(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in text) for i in range(len(header))]
    numeric = [
        all(isinstance(row[i], int | float) or _looks_numeric(row[i]) for row in rows) for i in range(len(header))
    ]
    lines = [
        "  ".join(
            c.rjust(w) if right else c.ljust(w) for c, w, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in text
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def markdown_table(rows: Sequence[Sequence[object]], *, header: Sequence[str]) -> str:
    """The same for a page: all columns but the first to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(printable(c).replace("|", "\\|") for c in line) + " |" for line in lines)


def _looks_numeric(cell: object) -> bool:
    return str(cell)[:1].isdigit() or cell in ("", "-")


def python_command() -> str:
    """How to call this same Python from the user's shell: by name where that finds it, else by its path."""
    if Path(shutil.which("python") or "").absolute() == Path(sys.executable).absolute():
        return "python"
    with contextlib.suppress(ValueError):
        return str(Path(sys.executable).relative_to(Path.cwd()))
    return sys.executable


def duration(seconds: float) -> str:
    """Seconds as 45s, 3m20s, 2h05m or 3d04h."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def byte_size(count: int) -> str:
    """Bytes as 512 B, 31.3 MB or 1.8 GB."""
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.95 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


class Progress:
    """How far a long task is: a bar with its latest figures, or a plain line every few seconds without a terminal."""

    def __init__(
        self,
        total: int | None,
        *,
        start: int = 0,
        label: str,
        unit: str,
        every_seconds: float = 10.0,
        to: TextIO | None = None,
    ) -> None:
        """`to` is where plain lines go, and whose being a terminal decides for the bar; stdout, if not given."""
        self.to = to or sys.stdout
        self.total, self.start, self.label, self.unit = total, start, label, unit
        self.every_seconds = every_seconds
        self.count = start
        self.figures: dict[str, str] = {}
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
        if self.bar.disable and time.monotonic() - self.last_line >= self.every_seconds:
            self.line()

    def show(self, **figures: str) -> None:
        """Replace the figures beside the bar."""
        self.figures = figures
        self.bar.set_postfix(figures, refresh=False)

    def line(self) -> None:
        self.last_line = time.monotonic()
        amount = byte_size if self.unit == "B" else lambda count: f"{count}"
        total = f"/{amount(self.total)}" if self.total else ""
        unit = "" if self.unit == "B" else f" {self.unit}"
        figures = "".join(f"  {name} {value}" for name, value in self.figures.items())
        eta = self.remaining()
        eta_text = f"  ETA {duration(eta)}" if eta else ""
        _write(f"{self.label} {amount(self.count)}{total}{unit}{figures}{eta_text}", self.to)

    def remaining(self) -> float | None:
        done = self.count - self.start
        if not self.total or done <= 0:
            return None
        return (time.monotonic() - self.began) / done * (self.total - self.count)

    def close(self) -> None:
        self.bar.close()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        self.close()
