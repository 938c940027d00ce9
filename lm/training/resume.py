"""What a continued run may change: limits, logging and device; everything else must be as it was.

Settings that may change are marked `MayChange` where they are declared.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, cast, get_type_hints

from lm.config.groups import Schedule
from lm.config.rules import MayChange
from lm.config.schema import TrainConfig
from lm.config.validate import flatten, make_config, plain_values, settings_class, split_annotation
from lm.system.errors import UserError


def continued(config: TrainConfig, content: dict[str, Any], *, overrides: list[str]) -> TrainConfig:
    """The settings of a continued run: its own, but for those asked for now, which must be free to change."""
    old, new = content["config"], plain_values(config)
    if new["output"].get("cutoffs") == "auto":
        # What was chosen when the run began stays chosen, whatever the machine would say today.
        new["output"]["cutoffs"] = old["output"].get("cutoffs")
    if config.resume != "auto":
        asked = [override.lstrip("+~").partition("=")[0] for override in overrides]
        if "experiment" not in asked:
            new = _replace(old, {key: v for key, v in flatten(new).items() if _is_asked(key, asked)})
    differing = list(changed_keys(old, new))
    if differing:
        listed = "\n".join(f"  {key}: {before!r} in the run, {after!r} now" for key, before, after in differing)
        schedule = Schedule(new["optim"]["schedule"])
        fixing = [key for key, _, _ in differing if key.removeprefix("trainer.") in schedule.counted_from]
        why = f" The learning rate of optim.schedule={schedule.value} depends on {', '.join(fixing)}." if fixing else ""
        raise UserError(
            "A run can be resumed only with its own settings, except limits, logging, saving, device and threads. "
            f"These differ:\n{listed}\nLeave them out, or start a new run without resume.{why}"
        )
    return make_config(new, TrainConfig)


def _is_asked(key: str, asked: list[str]) -> bool:
    return key in ("run_dir", "resume") or any(key == name or key.startswith(f"{name}.") for name in asked)


def _replace(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Nested values with some dotted keys replaced."""
    result = {key: _replace(value, {}) if isinstance(value, dict) else value for key, value in values.items()}
    for key, value in changes.items():
        *groups, last = key.split(".")
        place = result
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = value
    return result


def may_change(schema: type, *, values: Mapping[str, Any] | None = None) -> Iterator[str]:
    """The keys that may differ between a run and its continuation; with `values`, also those of the chosen plug-ins."""
    return (key for key, rules, _ in _settings(schema, values) if MayChange in rules)


def defaults(schema: type, *, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The settings that have a default, which older runs may lack; with `values`, also those of the chosen plug-ins."""
    return {key: default for key, _, default in _settings(schema, values) if default is not MISSING}


def _settings(
    schema: type, values: Mapping[str, Any] | None, *, prefix: str = ""
) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """Key, rules and default (MISSING where there is none) of every setting."""
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
    """Settings that differ between a run and its continuation though they must not."""
    free = set(may_change(TrainConfig, values=new))
    free -= {f"trainer.{key}" for key in Schedule(new["optim"]["schedule"]).counted_from}
    later = defaults(TrainConfig, values=new)
    before, after = {**later, **flatten(old)}, {**later, **flatten(new)}  # older runs lack newer settings
    for key in sorted(before.keys() | after.keys()):
        chosen = key == "output.cutoffs" and after.get(key) == "auto"  # a run keeps what was chosen when it began
        if key not in free and not chosen and before.get(key) != after.get(key):
            yield key, before.get(key), after.get(key)
