"""Write docs/settings.md from the settings' dataclasses: python -m tests.helpers.settings_page > docs/settings.md"""

from collections.abc import Iterator, Sequence

from lm.config.groups import FOLDERS, find_plugin, plugin_names
from lm.config.inference import EvaluateConfig, ExportConfig, GenerateConfig
from lm.config.reference import document
from lm.config.schema import NgramConfig, TrainConfig


def markdown() -> str:
    """Return the content of docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "Every setting, its default and what it does. `--help` prints the same lines with a command line's values.",
        "Files in `conf/` hold what differs from these defaults. `python -m tests.helpers.settings_page` prints it.",
    ]
    lines += _command_table("train.py", TrainConfig)
    for group in FOLDERS:
        lines += [*_group_tables(group)]
    commands = {
        "evaluate.py": EvaluateConfig,
        "-m lm.generate": GenerateConfig,
        "-m lm.ngram": NgramConfig,
        "-m lm.export": ExportConfig,
    }
    return "\n".join(lines + [line for command in commands.items() for line in _command_table(*command)])


def _command_table(command: str, schema: type) -> list[str]:
    """Return a table of a command's own settings, without those of plug-ins, which have a name."""
    entries = document(schema)
    keys = {key for key, _, _ in entries}
    own = [entry for entry in entries if f"{entry[0].partition('.')[0]}.name" not in keys]
    return ["", f"## python {command}", "", *_table(own)]


def _group_tables(group: str) -> Iterator[str]:
    """Yield a table of the settings shared by a group's options, and one for each option with more."""
    by_option = {}
    for name in plugin_names(group):
        found = document(find_plugin(group, name).settings, prefix=f"{group}.")
        by_option[name] = [row for row in found if row[0] != f"{group}.name"]
    first, *others = by_option.values()
    shared = [row for row in first if all(row in rows for rows in others)]
    yield from ["", f"## {group}", "", f"Options: {', '.join(f'`{group}={name}`' for name in by_option)}.", ""]
    yield from _table(shared)
    for name, rows in by_option.items():
        if own := [row for row in rows if row not in shared]:
            yield from ["", f"### {group}={name}", "", *_table(own)]


def _table(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    lines = ["| setting | default | |", "|---|---|---|"]
    for key, default, explanation in rows:
        text = " ".join(explanation.split()).replace("|", "\\|")
        lines.append(f"| `{key}` | `{default}` | {text} |")
    return lines


if __name__ == "__main__":
    print(markdown())
