"""Document every setting, its default and its explanation, for `--help`."""

import ast
import inspect
import textwrap
from dataclasses import MISSING, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from lm.config.groups import FOLDERS
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


def help_text(documentation: str, config: DictConfig, schema: type, *, conf: Path) -> str:
    """Format `--help`: usage, groups, and the settings with their values on this command line."""
    values = cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False))
    values.pop("hydra")
    lines = [documentation.strip(), ""]
    options = {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in conf.iterdir()}
    # evaluate.py has other settings with the names of groups.
    nested = {name: value for name, value in values.items() if name in options and isinstance(value, dict)}
    if groups := [name for name, value in nested.items() if "name" in value or name not in FOLDERS]:
        shown = [*groups, *(["experiment"] if "trainer" in groups else [])]
        lines += ["Groups (group=option):", *(f"  {name}: {', '.join(options[name])}" for name in shown), ""]
    lines.append("Settings (key=value), with their values on this command line:")
    flat = flatten(values)
    for key, _, explanation in document(schema, values):
        lines.append(f"  {key}={typed(flat.get(key))}")
        lines += textwrap.wrap(explanation, 110, initial_indent="      ", subsequent_indent="      ")
    return "\n".join([*lines, "", "--cfg job prints the settings alone, --hydra-help Hydra's own options."])
