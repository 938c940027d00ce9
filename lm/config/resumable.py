"""Settings of existing runs, and which of them may change on resume: those declared as `Resumable`."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lm.config.groups import DEPENDS_ON
from lm.config.rules import Resumable
from lm.config.schema import TrainConfig
from lm.config.validate import all_settings, flatten


def read_settings(run: Path) -> dict[str, Any]:
    """Read a run's config.yaml; empty if it is missing or damaged."""
    try:
        values = yaml.safe_load((run / "config.yaml").read_bytes())
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def may_change(schema: type, *, values: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Return keys that may change on resume; with `values`, including those of the chosen plug-ins."""
    return (setting.key for setting in all_settings(schema, values) if Resumable in setting.rules)


def defaults(schema: type, *, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return defaults by key, for runs that predate a setting; with `values`, including the chosen plug-ins."""
    return {s.key: s.default for s in all_settings(schema, values) if s.default is not MISSING}


def changed_keys(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield settings that must not change on resume but did: key, old value, new value."""
    free = set(may_change(TrainConfig, values=new))
    free -= {f"trainer.{key}" for key in DEPENDS_ON.get(new["optim"]["schedule"], ())}
    later = defaults(TrainConfig, values=new)
    before, after = {**later, **flatten(old)}, {**later, **flatten(new)}  # older runs lack newer settings
    for key in sorted(before.keys() | after.keys()):
        chosen = key == "output.cutoffs" and after.get(key) == "auto"  # a run keeps the cutoffs chosen at its start
        if key not in free and not chosen and before.get(key) != after.get(key):
            yield key, before.get(key), after.get(key)
