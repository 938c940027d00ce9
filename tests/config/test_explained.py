"""Every setting is explained where it is declared."""

import ast
import inspect
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any, get_type_hints

import pytest

from lm.config import commands, running
from lm.config.registry import FOLDERS, find_plugin, plugin_names
from lm.config.validate import split_annotation

COMMANDS = [c for module in (commands, running) for c in vars(module).values() if inspect.isclass(c)]
PLUGINS = [find_plugin(group, name).settings for group in FOLDERS for name in plugin_names(group)]


def explained(schema: type) -> set[str]:
    """The fields that a string follows, in the class or in one that it inherits from."""
    found: set[str] = set()
    for base in filter(is_dataclass, schema.__mro__):
        module: Any = inspect.getmodule(base)
        body = next(node for node in ast.walk(ast.parse(inspect.getsource(module))) if _defines(node, base)).body  # type: ignore[attr-defined]
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(field.target, ast.Name):
                found.add(field.target.id)
    return found


def _defines(node: ast.AST, base: type) -> bool:
    return isinstance(node, ast.ClassDef) and node.name == base.__name__


@pytest.mark.parametrize("schema", [c for c in COMMANDS if is_dataclass(c) and c.__name__.endswith("Config")] + PLUGINS)
def test_every_setting_has_a_line_of_explanation(schema: type) -> None:
    hints = get_type_hints(schema, include_extras=True)
    groups = {name for name, hint in hints.items() if is_dataclass(split_annotation(hint)[0])}
    assert {field.name for field in fields(schema)} - groups <= explained(schema)
