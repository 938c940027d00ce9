"""Document every setting, its default and its explanation, for `--help` and docs/settings.md.

python -m lm.config.reference > docs/settings.md
"""

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast, get_type_hints

from omegaconf import DictConfig, OmegaConf

from lm.config.registry import FOLDERS, find_plugin, is_group, plugin_names
from lm.config.validate import default_values, flatten, settings_class, split_annotation, typed


class Setting(NamedTuple):
    """A setting of a command or plug-in."""

    key: str
    default: Any
    """None if there is no default."""
    explanation: str


def settings(schema: type, *, prefix: str = "", values: Any = None) -> Iterator[Setting]:
    """Yield a dataclass's settings in order; with `values`, including those of the plug-ins named there."""
    defaults = default_values(schema)
    for name, annotation in get_type_hints(schema, include_extras=True).items():
        inner, _ = split_annotation(annotation)
        if is_dataclass(inner):
            value = (values or {}).get(name)
            if value is not None or not is_group(name):
                chosen = settings_class(name, value, cast(type, inner))
                yield from settings(chosen, prefix=f"{prefix}{name}.", values=value)
        else:
            yield Setting(prefix + name, defaults.get(name), explanations(schema).get(name, ""))


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
    for setting in settings(schema, values=values):
        lines.append(f"  {setting.key}={typed(flat.get(setting.key))}")
        lines += textwrap.wrap(setting.explanation, 110, initial_indent="      ", subsequent_indent="      ")
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
    """docs/settings.md."""
    from lm.config.inference import EvaluateConfig, GenerateConfig
    from lm.config.schema import NgramConfig, TrainConfig

    lines = [
        "# Settings",
        "",
        "Every setting, its default and what it does. Generated: `python -m lm.config.reference > docs/settings.md`.",
        "`--help` prints the same lines with the values of a command line. Files in `conf/` hold what differs from",
        "these defaults.",
    ]
    lines += ["", "## python train.py", "", *_table(settings(TrainConfig))]
    for group in FOLDERS:
        lines += [*_group_tables(group)]
    commands = {"python evaluate.py": EvaluateConfig, "python -m lm.generate": GenerateConfig}
    for command, schema in {**commands, "python -m lm.ngram": NgramConfig}.items():
        lines += ["", f"## {command}", "", *_table(settings(schema))]
    return "\n".join(lines)


def _group_tables(group: str) -> Iterator[str]:
    """Yield a table of the settings shared by a group's options, and one for each option with more."""
    by_option = {}
    for name in plugin_names(group):
        found = settings(find_plugin(group, name).settings, prefix=f"{group}.")
        by_option[name] = [row for row in found if row.key != f"{group}.name"]
    first, *others = by_option.values()
    shared = [row for row in first if all(row in rows for rows in others)]
    yield from ["", f"## {group}", "", f"Options: {', '.join(f'`{group}={name}`' for name in by_option)}.", ""]
    yield from _table(shared)
    for name, rows in by_option.items():
        if own := [row for row in rows if row not in shared]:
            yield from ["", f"### {group}={name}", "", *_table(own)]


def _table(rows: Iterable[Setting]) -> list[str]:
    lines = ["| setting | default | |", "|---|---|---|"]
    for key, default, explanation in rows:
        text = " ".join(explanation.split()).replace("|", "\\|")
        lines.append(f"| `{key}` | `{typed(default)}` | {text} |")
    return lines


if __name__ == "__main__":
    print(markdown())
