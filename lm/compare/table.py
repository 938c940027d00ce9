"""The comparison as a table: for the terminal, as Markdown, as CSV and as JSON."""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lm.compare.paper import NOTE
from lm.compare.rows import Figure, Row, Section
from lm.system.console import markdown_table, printable, table


@dataclass(frozen=True)
class Column:
    """A column: its heading for people, its key for programs, its value of a row and how that is shown."""

    heading: str
    key: str
    value: Callable[[Row], Any]
    form: str = "{}"
    papers: bool = False
    words: bool = False
    """Shown only where runs on words and on pieces of words may be compared."""

    def is_shown(self, section: Section) -> bool:
        if self.key == "runs":
            return section.has_repetitions
        return (not self.papers or section.has_paper) and (not self.words or section.beside_pieces)

    @property
    def is_measured(self) -> bool:
        """Whether repetitions give a mean and a standard deviation."""
        return self.key.endswith(("_last", "_best", "_word", "_minutes", "_second", "_gib")) and not self.papers


COLUMNS = (
    Column("layer", "layer", lambda row: row.label),
    Column("runs", "runs", lambda row: len(row.runs)),
    Column("parameters", "parameters", lambda row: row.parameters, "{:,}"),
    Column("valid ppl", "valid_perplexity_last", lambda row: row.valid("last"), "{:.2f}"),
    Column("best", "valid_perplexity_best", lambda row: row.valid("best"), "{:.2f}"),
    Column("test ppl", "test_perplexity_last", lambda row: row.test("last"), "{:.2f}"),
    Column("best", "test_perplexity_best", lambda row: row.test("best"), "{:.2f}"),
    Column("per known word", "test_perplexity_per_known_word", lambda row: row.per_known_word, "{:.2f}", words=True),
    Column("epochs", "epochs", lambda row: row.epochs, "{:g}"),
    Column("minutes", "training_minutes", lambda row: row.minutes, "{:.2f}"),
    Column("tokens/s", "tokens_per_second", lambda row: row.tokens_per_second, "{:,.0f}"),
    Column("peak GiB", "peak_memory_gib", lambda row: row.peak_gib, "{:.2f}"),
    Column("speed-up", "speed_up_over_full", lambda row: row.speed_up, "{:.2f}"),
    Column("paper's ppl", "paper_perplexity", lambda row: row.paper and row.paper.perplexity, "{:g}", papers=True),
    Column("paper's minutes", "paper_minutes", lambda row: row.paper and row.paper.minutes, "{:g}", papers=True),
    Column("paper's speed-up", "paper_speed_up", lambda row: row.paper and row.paper.speed_up, "{:.2f}", papers=True),
)
UNFINISHED = " *"


def as_text(section: Section) -> str:
    header, cells = _cells(section)
    return "\n".join([f"{section.name}", table(cells, header=header), *_notes(section)])


def as_markdown(all_sections: Sequence[Section], *, images: dict[str, list[str]]) -> str:
    """The tables and the notes; `images` are the files of each section's plots."""
    parts = ["# Comparison"]
    for section in all_sections:
        header, cells = _cells(section)
        rows = markdown_table(cells, header=header)
        parts += [f"## {printable(section.name)}", rows, "\n".join(_notes(section)).replace("*", "\\*")]
        parts += [f"![{file}]({file})" for file in images.get(section.name, [])]
    return "\n\n".join(parts) + "\n"


def as_csv(all_sections: Sequence[Section]) -> str:
    """A line per row; where runs were merged the mean, and beside it the standard deviation."""
    records = as_records(all_sections)
    file = io.StringIO()
    writer = csv.DictWriter(file, fieldnames=list(records[0]))
    writer.writeheader()
    writer.writerows(record | {"folders": "; ".join(record["folders"])} for record in records)
    return file.getvalue()


def as_records(all_sections: Sequence[Section]) -> list[dict[str, Any]]:
    """Every row as plain values at full precision, all with the same keys; what is not known is None."""
    return [_record(section, row) for section in all_sections for row in section.rows]


def _record(section: Section, row: Row) -> dict[str, Any]:
    record: dict[str, Any] = {"corpus": section.name, "finished": row.finished}
    for column in COLUMNS:
        value = column.value(row)
        record[column.key] = value.mean if isinstance(value, Figure) else value
        if column.is_measured:
            record[f"{column.key}_spread"] = value.spread if isinstance(value, Figure) else None
    return record | {"folders": [str(run.path) for run in row.runs]}


def _cells(section: Section) -> tuple[list[str], list[list[str]]]:
    columns = [column for column in COLUMNS if column.is_shown(section)]
    cells = [[_shown(column, row) for column in columns] for row in section.rows]
    return [column.heading for column in columns], cells


def _shown(column: Column, row: Row) -> str:
    value = column.value(row)
    if value is None:
        return "-"
    if column.key == "layer":
        return str(value) + ("" if row.finished else UNFINISHED)
    if isinstance(value, Figure):
        spread = f" ± {column.form.format(value.spread)}" if value.spread is not None else ""
        return column.form.format(value.mean) + spread
    return column.form.format(value)


def _notes(section: Section) -> list[str]:
    notes = ["Speed-up: tokens/s over those of the full softmax with the same settings."]
    if section.has_repetitions:
        notes.append("Runs that differ only in their seed are one row: mean ± standard deviation.")
    if not all(row.finished for row in section.rows):
        notes.append("* has not reached its limits: these are its latest figures.")
    if section.beside_pieces:
        notes.append("Per known word: test perplexity without <unk>, which words and pieces of words have in common.")
    if section.has_paper:
        notes.append(NOTE)
    return notes
