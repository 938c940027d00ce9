"""Format a comparison for the terminal and as Markdown, LaTeX, CSV and JSON."""

import csv
import html
import io
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from typing import Any

from lm.compare.paper import NOTE
from lm.compare.rows import Mean, Row, Section
from lm.compare.run_records import Run
from lm.system.console import markdown_table, printable, table
from lm.system.errors import UserError


@dataclass(frozen=True)
class Column:
    """A table column: its heading, its JSON key, and how to get and format its value."""

    heading: str
    key: str
    value: Callable[[Row], Any]
    form: str = "{}"
    shown: Callable[[Section], Any] = lambda _: True
    extra: bool = False
    """Whether the terminal shows the column only on request."""
    measured: bool = False
    """Whether the value is a mean with a standard deviation."""


def _measured(heading: str, key: str, of: Callable[[Run], float | None], form: str = "{:.2f}", **more: Any) -> Column:
    return Column(heading, key, lambda row: row.mean(of), form, measured=True, **more)


def _relative(heading: str, key: str, attribute: str, form: str, *, extra: bool = False) -> Column:
    """Return a column of values relative to the full softmax, shown if a row has one."""
    of = attrgetter(attribute)
    return Column(heading, key, of, form, shown=lambda section: any(map(of, section.rows)), extra=extra)


def _papers(heading: str, key: str, form: str, *, extra: bool = True) -> Column:
    names, shown = (f"paper's {heading}", f"paper_{key}"), attrgetter("has_paper")
    return Column(*names, lambda row: getattr(row.paper, key, None), form, shown=shown, extra=extra)


def _of_best(heading: str, key: str, split: str) -> Column:
    """Return a column shown only if some run got worse after its best evaluation."""

    def differs(section: Section) -> bool:
        runs = [run for row in section.rows for run in row.runs]
        return any(run.perplexity("valid", "best") != run.perplexity("valid", "last") for run in runs)

    return _measured(heading, key, lambda run: run.perplexity(split, "best"), shown=differs, extra=True)


COLUMNS = (
    Column("model", "layer", lambda row: row.label),
    Column("runs", "runs", lambda row: len(row.runs), shown=lambda section: section.has_repetitions),
    Column("parameters", "parameters", lambda row: row.runs[0].parameters, "{:,}"),
    _measured("valid ppl", "valid_perplexity_last", lambda run: run.perplexity("valid", "last")),
    _of_best("best valid", "valid_perplexity_best", "valid"),
    _measured("test ppl", "test_perplexity_last", lambda run: run.perplexity("test", "last")),
    _of_best("best's test", "test_perplexity_best", "test"),
    _measured(
        "per known word",
        "test_perplexity_per_known_word",
        lambda run: run.perplexity("test_without_unk", "last"),
        shown=lambda section: section.beside_pieces,
    ),
    Column("epochs", "epochs", lambda row: row.epochs, "{:.3g}"),
    _measured("minutes", "training_minutes", lambda run: run.minutes),
    _measured("tokens/s", "tokens_per_second", lambda run: run.tokens_per_second, "{:,.0f}"),
    _measured("peak GiB", "peak_memory_gib", lambda run: run.peak_gib, extra=True),
    _relative("x full ppl", "perplexity_over_full", "relative_perplexity", "{:.3f}", extra=True),
    _relative("speed-up", "speed_up_over_full", "speed_up", "{:.2f}"),
    _papers("ppl", "perplexity", "{:g}", extra=False),
    _papers("minutes", "minutes", "{:g}"),
    _papers("speed-up", "speed_up", "{:.2f}"),
)
MAX_NAME, MAX_WIDTH = 28, 120
"""Maximum length of a row's name on the terminal, unless cut names look alike, and of a line."""


def choose_columns(names: str) -> list[Column]:
    """Return the columns with these headings, separated by commas; the row's name comes first."""
    known = {column.heading: column for column in COLUMNS}
    chosen = [name.strip() for name in names.split(",")]
    if unknown := [name for name in chosen if name not in known]:
        raise UserError(f"--columns must be among {', '.join(known)}; got {', '.join(unknown)}.")
    return [COLUMNS[0], *(known[name] for name in chosen if known[name] is not COLUMNS[0])]


def as_text(section: Section, columns: Sequence[Column] = ()) -> str:
    """Format for the terminal, with the given columns or the most important ones."""
    shown = [column for column in COLUMNS if column.shown(section)]
    chosen = columns or _fitting(section, [column for column in shown if not column.extra])
    extra = [column.heading for column in shown if column not in chosen]
    left_out = f"In comparison.md there are also: {', '.join(extra)}." if extra and not columns else ""
    return "\n".join([section.name, _aligned(section, chosen), *_notes(section), *textwrap.wrap(left_out, MAX_WIDTH)])


def _fitting(section: Section, columns: list[Column]) -> list[Column]:
    """Leave out columns until the table is no wider than MAX_WIDTH."""
    while len(columns) > 1 and max(map(len, _aligned(section, columns).splitlines())) > MAX_WIDTH:
        least = next((column for column in columns if column.heading in ("epochs", "minutes")), columns[-1])
        columns = [column for column in columns if column is not least]
    return columns


def _aligned(section: Section, columns: Sequence[Column]) -> str:
    """Format the rows for the terminal, with shortened names."""
    header, cells = _cells(section, columns)
    names = {line[0] for line in cells}
    length = next(n for n in count(MAX_NAME) if len({_cut(name, n) for name in names}) == len(names))
    return table([[_cut(line[0], length), *line[1:]] for line in cells], header=header)


def _cut(name: str, length: int) -> str:
    """Cut the middle out of a long name; names usually differ at the ends."""
    return name if len(name) <= length else f"{name[: length // 3]}…{name[-(length - length // 3 - 1) :]}"


def as_latex(all_sections: Sequence[Section], columns: Sequence[Column] = ()) -> str:
    """Format as LaTeX tables, which need the package booktabs."""
    parts = []
    for section in all_sections:
        header, cells = _cells(section, columns)
        header, *rows = [[_for_latex(cell) for cell in line] for line in [header, *cells]]
        body = " \\\\\n".join(" & ".join(line) for line in rows)
        parts.append(
            f"% {printable(section.name)}\n\\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}\n\\toprule\n"
            f"{' & '.join(header)} \\\\\n\\midrule\n{body} \\\\\n\\bottomrule\n\\end{{tabular}}\n"
        )
    return "\n".join(parts)


def _for_latex(text: str) -> str:
    """Escape LaTeX's special characters."""
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
    return "".join(special.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in printable(text))


def as_markdown(
    all_sections: Sequence[Section], columns: Sequence[Column] = (), *, images: dict[str, list[str]]
) -> str:
    """Format tables and notes as Markdown; `images` lists each section's plot files."""
    parts = ["# Comparison"]
    for section in all_sections:
        header, cells = _cells(section, columns)
        rows = markdown_table([[_for_markdown(cell) for cell in line] for line in cells], header=header)
        parts += [f"## {_for_markdown(section.name)}", rows, "\n".join(map(_for_markdown, _notes(section)))]
        parts += [f"![{file}]({file})" for file in images.get(section.name, [])]
    return "\n\n".join(parts) + "\n"


def as_csv(all_sections: Sequence[Section]) -> str:
    """Format as CSV, with means and standard deviations in separate columns."""
    records = as_records(all_sections)
    file = io.StringIO()
    writer = csv.DictWriter(file, fieldnames=list(records[0]))
    writer.writeheader()
    for record in records:
        cells = record | {"folders": "; ".join(record["folders"])}
        writer.writerow({key: _for_csv(cell) if isinstance(cell, str) else cell for key, cell in cells.items()})
    return file.getvalue()


def _for_markdown(text: str) -> str:
    """Escape text for Markdown and HTML."""
    return re.sub(r"([\\`*\[\]])", r"\\\1", html.escape(text, quote=False))


def _for_csv(text: str) -> str:
    """Escape text so that a spreadsheet does not treat it as a formula."""
    return "'" * text.startswith(("=", "+", "-", "@", "\t", "\r")) + printable(text)


def as_records(all_sections: Sequence[Section]) -> list[dict[str, Any]]:
    """Return rows as plain values at full precision, all with the same keys; unknown values are None."""
    return [_record(section, row) for section in all_sections for row in section.rows]


def _record(section: Section, row: Row) -> dict[str, Any]:
    record: dict[str, Any] = {"corpus": section.name, "finished": row.finished}
    for column in COLUMNS:
        value = column.value(row)
        record[column.key] = value.mean if isinstance(value, Mean) else value
        if column.measured:
            record[f"{column.key}_spread"] = value.spread if isinstance(value, Mean) else None
    return record | {"folders": [str(run.path) for run in row.runs]}


def _cells(section: Section, columns: Sequence[Column] = ()) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows; all columns unless some are given."""
    columns = columns or [column for column in COLUMNS if column.shown(section)]
    cells = [[_shown(column, row) for column in columns] for row in section.rows]
    for line, row in zip(cells, section.rows, strict=True):
        line[0] += " (best)" if row is section.winner else ""
    return [column.heading for column in columns], cells


def _shown(column: Column, row: Row) -> str:
    value = column.value(row)
    if value is None:
        return "-"
    if column.key == "layer":
        return str(value) + ("" if row.finished else " *")
    if isinstance(value, Mean):
        spread = f" ± {column.form.format(value.spread)}" if value.spread is not None else ""
        return column.form.format(value.mean) + spread
    return column.form.format(value)


def _notes(section: Section) -> list[str]:
    notes = ["Sorted by the last validation perplexity."]
    if any(row.speed_up for row in section.rows):
        notes.append("Speed-up: tokens/s relative to the full softmax with the same settings; x full ppl: validation.")
    if section.has_repetitions:
        notes.append("Runs that differ only in their seed are one row: mean ± standard deviation.")
    if not all(row.finished for row in section.rows):
        notes.append("* not finished; these are the latest values.")
    if section.beside_pieces:
        notes.append("Per known word: test perplexity without <unk>, which is comparable between words and subwords.")
    if section.has_paper:
        notes.append(NOTE)
    if section.source:
        notes.append(f"Text: {printable(section.source)}.")
    return notes
