"""Map over nested containers: states, plans, batches, checkpoints, JSON values."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any


def map_leaves(change: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply `change` to each leaf, together with the leaves at the same position in the other trees.

    Dicts, lists, tuples, named tuples and dataclasses are containers; everything else is a leaf.
    """
    if isinstance(tree, dict):
        return {key: map_leaves(change, item, *(other[key] for other in others)) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        items = [map_leaves(change, *parts) for parts in zip(tree, *others, strict=True)]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in fields(tree)]
        parts = [[getattr(each, name) for each in (tree, *others)] for name in names]
        return replace(tree, **{name: map_leaves(change, *part) for name, part in zip(names, parts, strict=True)})
    return change(tree, *others)


def leaves(tree: Any) -> list[Any]:
    """Return all leaves, in order."""
    found: list[Any] = []
    map_leaves(found.append, tree)
    return found
