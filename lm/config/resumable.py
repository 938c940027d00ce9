"""Which settings may change on resume: limits, logging, device; marked `Resumable` where declared."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, cast, get_type_hints

from lm.config.groups import Schedule
from lm.config.rules import Resumable
from lm.config.schema import TrainConfig
from lm.config.validate import flatten, plain_values, settings_class, split_annotation


def may_change(schema: type, *, values: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Return keys that may change on resume; with `values`, including those of the chosen plug-ins."""
    return (key for key, rules, _ in _settings(schema, values) if Resumable in rules)


def defaults(schema: type, *, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return defaults by key, for runs that predate a setting; with `values`, including the chosen plug-ins."""
    return {key: default for key, _, default in _settings(schema, values) if default is not MISSING}


def _settings(
    schema: type, values: Mapping[str, Any] | None, *, prefix: str = ""
) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """Yield key, rules and default (or MISSING) of every setting."""
    defaults = {field.name: field.default for field in fields(schema)}
    for name, annotation in get_type_hints(schema, include_extras=True).items():
        bare, rules = split_annotation(annotation)
        if is_dataclass(bare):
            inner = (values or {}).get(name)
            chosen = settings_class(name, inner, cast(type, bare)) if inner else cast(type, bare)
            yield from _settings(chosen, inner, prefix=f"{prefix}{name}.")
        else:
            yield prefix + name, rules, plain_values(defaults[name])


def changed_keys(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield settings that must not change on resume but did: key, old value, new value."""
    free = set(may_change(TrainConfig, values=new))
    free -= {f"trainer.{key}" for key in Schedule(new["optim"]["schedule"]).counted_from}
    later = defaults(TrainConfig, values=new)
    before, after = {**later, **flatten(old)}, {**later, **flatten(new)}  # older runs lack newer settings
    for key in sorted(before.keys() | after.keys()):
        chosen = key == "output.cutoffs" and after.get(key) == "auto"  # a run keeps the cutoffs chosen at its start
        if key not in free and not chosen and before.get(key) != after.get(key):
            yield key, before.get(key), after.get(key)
