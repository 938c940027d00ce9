"""Document every setting, its default and its explanation, for `--help` and docs/settings.md.

python -m lm.config.reference > docs/settings.md
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from lm.config.registry import FOLDERS, find_plugin, is_group, plugin_names
from lm.config.validate import all_settings, flatten, typed


def document(schema: type, values: Any = None, *, prefix: str = "") -> list[tuple[str, str, str]]:
    """Return key, default and explanation of settings in order; with `values`, also of the plug-ins chosen there."""
    return [
        (s.key, typed(None if s.default is MISSING else s.default), explanations(s.owner)[s.key.rpartition(".")[2]])
        for s in all_settings(schema, values, prefix=prefix)
    ]


@cache
def explanations(schema: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, including its bases."""
    found: dict[str, str] = {}
    for base in reversed([base for base in schema.__mro__ if is_dataclass(base)]):
        body = cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]).body
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[cast(ast.Name, field.target).id] = inspect.cleandoc(str(text.value.value))
    return found


def help_text(documentation: str, config: DictConfig, schema: type) -> str:
    """Format `--help`: usage, groups, and the settings with their values on this command line."""
    values = cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False))
    values.pop("hydra")
    lines = [documentation.strip(), ""]
    if groups := [name for name, value in values.items() if _has_options(name, value)]:
        shown = [*groups, *(["experiment"] if "trainer" in groups else [])]
        lines += ["Groups (group=option):", *(f"  {name}: {', '.join(options(name))}" for name in shown), ""]
    lines.append("Settings (key=value), with their values on this command line:")
    flat = flatten(values)
    for key, _, explanation in document(schema, values):
        lines.append(f"  {key}={typed(flat.get(key))}")
        lines += textwrap.wrap(explanation, 110, initial_indent="      ", subsequent_indent="      ")
    return "\n".join([*lines, "", "--cfg job prints the settings alone, --hydra-help Hydra's own options."])


def _has_options(name: str, value: Any) -> bool:
    """Whether a setting is a group with options in `conf/`; evaluate.py has other settings of the same names."""
    return (conf() / name).is_dir() and isinstance(value, dict) and ("name" in value or not is_group(name))


def conf() -> Path:
    return Path(__file__).resolve().parents[2] / "conf"


def options(group: str) -> list[str]:
    """List the options of a group in `conf/`."""
    return sorted(path.stem for path in (conf() / group).glob("*.yaml"))


def markdown() -> str:
    """Return the content of docs/settings.md."""
    from lm.config.inference import EvaluateConfig, ExportConfig, GenerateConfig
    from lm.config.schema import NgramConfig, TrainConfig

    lines = [
        "# Settings",
        "",
        "Every setting, its default and what it does. Generated: `python -m lm.config.reference > docs/settings.md`.",
        "`--help` prints the same lines with the values of a command line. Files in `conf/` hold what differs from",
        "these defaults.",
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
