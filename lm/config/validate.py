"""Convert composed configs to typed settings, reporting all mistakes together; compare those of a resumed run."""

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, OmegaConf

from lm.config.groups import DEPENDS_ON, FOLDERS, Increasing, MayBeEmpty, Range, Resumable, find_plugin, plugin_names
from lm.config.schema import TrainConfig
from lm.system.errors import UserError

Schema = TypeVar("Schema")


def make_config(values: DictConfig | Mapping[str, Any], schema: type[Schema]) -> Schema:
    """Convert composed values to typed settings; raises one UserError that lists everything wrong."""
    problems: list[str] = []
    plain = OmegaConf.to_container(values, resolve=True) if isinstance(values, DictConfig) else values
    config = _read(plain, schema, problems)
    if problems:
        raise UserError("\n".join(problems))
    return cast(Schema, config)


def find_problems(values: Any, schema: type) -> list[str]:
    """Return a line for each key that is unknown, missing, of the wrong type or out of range."""
    problems: list[str] = []
    _read(values, schema, problems)
    return problems


def default_values(schema: type) -> dict[str, Any]:
    """Return the plain default of every setting that has one."""
    values: dict[str, Any] = {}
    for field in fields(schema):
        if field.default is not MISSING:
            values[field.name] = field.default
        elif field.default_factory is not MISSING:
            value: Any = field.default_factory()
            values[field.name] = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    return values


class Setting(NamedTuple):
    """A setting of a command or plug-in."""

    key: str
    rules: tuple[Any, ...]
    default: Any
    """Default as a plain value, or MISSING."""
    owner: type
    """Dataclass that has the field."""


def all_settings(schema: type, values: Mapping[str, Any] | None = None, *, prefix: str = "") -> Iterator[Setting]:
    """Yield a dataclass's settings in order; with `values`, including those of the plug-ins chosen there."""
    defaults = default_values(schema)
    for name, annotation in get_type_hints(schema, include_extras=True).items():
        bare, rules = split_annotation(annotation)
        if is_dataclass(bare):
            inner, settings = (values or {}).get(name), cast(type, bare)
            if _is_plugin(name, settings) and isinstance(inner, Mapping):
                settings = find_plugin(name, inner["name"]).settings
            yield from all_settings(settings, inner, prefix=f"{prefix}{name}.")
        else:
            yield Setting(prefix + name, rules, defaults.get(name, MISSING), schema)


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Return the message for an unknown key: a close match, or the keys of its group."""
    known = sorted(known)
    section, _, last = key.rpartition(".")
    beside = [name for name in known if name.rpartition(".")[0] == section]
    # Compared by the last part alone: a shared prefix would make any two keys similar.
    if near := _nearest(last, beside) or _nearest(last, known):
        return f"{key} is not a setting. Did you mean {near}?"
    return f"{key} is not a setting. The keys there are: {', '.join(beside or known)}."


def _nearest(last: str, known: Iterable[str]) -> str | None:
    """Return the known key with the most similar last part."""
    by_last = {name.rpartition(".")[2]: name for name in known}
    return by_last.get(close_to(last, by_last) or "")


def close_to(word: str, known: Iterable[str]) -> str | None:
    """Return the known word most similar to a mistyped one."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)), None)


def flatten(values: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, prefix=f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


# ---- one field -----------------------------------------------------------------------------------------------


def _read(values: Any, schema: type, problems: list[str], *, prefix: str = "") -> Any:
    """Convert values to a dataclass, or add to the problems; older checkpoints lack settings that have a default."""
    if not isinstance(values, Mapping):
        problems.append(f"{prefix.rstrip('.')} must be a group of settings; got {values!r}.")
        return None
    annotations, defaults = get_type_hints(schema, include_extras=True), default_values(schema)
    problems += [
        unknown_key(prefix + key, (prefix + name for name in annotations)) for key in values if key not in annotations
    ]
    before, made = len(problems), {}
    for name, annotation in annotations.items():
        if name in values:
            made[name] = _read_field(prefix + name, values[name], annotation, defaults.get(name, MISSING), problems)
        elif name not in defaults:
            problems.append(f"{prefix}{name} is missing; it must be {_wanted(annotation)}.")
    if len(problems) > before:
        return None
    config = schema(**made)
    problems += config.problems() if hasattr(config, "problems") else []  # checks across fields
    return config


def _read_field(key: str, value: Any, annotation: Any, default: Any, problems: list[str]) -> Any:
    bare, rules = split_annotation(annotation)
    if is_dataclass(bare):
        settings = cast(type, bare)
        if _is_plugin(key, settings) and isinstance(value, Mapping):
            if value.get("name") not in (names := plugin_names(key)):
                got = f"{', '.join(names)}; got {value.get('name')!r}. Choose it with {key}=NAME."
                problems.append(f"{key}.name must be one of {got}")
                return None
            settings = find_plugin(key, value["name"]).settings
        return _read(value, settings, problems, prefix=f"{key}.")
    with suppress(ValueError, OverflowError):
        converted = _convert(value, bare)
        checks = [rule for rule in rules if isinstance(rule, Range | Increasing)]
        is_empty = converted == "" and MayBeEmpty not in rules
        if not is_empty and (isinstance(converted, str | None) or all(rule.holds(converted) for rule in checks)):
            return converted
    hint = "" if default is MISSING else f" Try {key}={typed(default)}."
    with suppress(ValueError, OverflowError):
        hint = f" Lists need brackets: {key}={typed(_convert([value], bare))}."
    if type(value) in LARGEST and 0 < abs(value) < math.inf and not 1e-30 <= abs(value) <= LARGEST[type(value)]:
        hint = f" Numbers are from 1e-30 to 1e30, whole ones at most 2^53.{hint}"
    problems.append(f"{key} must be {_wanted(annotation)}; got {value!r}.{hint}")
    return None


def _is_plugin(key: str, declared: type) -> bool:
    """Whether a group names a plug-in; some commands have unrelated groups of the same name."""
    return key in FOLDERS and "name" in get_type_hints(declared)


def split_annotation(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    if get_origin(annotation) is Annotated:
        bare, *rules = get_args(annotation)
        return bare, tuple(rules)
    return annotation, ()


def _options(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union, or the annotation alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _convert(value: Any, wanted: Any) -> Any:
    """Convert a value to its declared type, or raise ValueError; never rounds or turns numbers into booleans."""
    if len(options := _options(wanted)) > 1:
        for option in options:
            with suppress(ValueError, OverflowError):
                return _convert(value, option)
        raise ValueError
    if get_origin(wanted) is list:
        if not isinstance(value, list):
            raise ValueError
        return [_convert(item, get_args(wanted)[0]) for item in value]
    if wanted is Any:
        return value
    if get_origin(wanted) is Literal:
        if value not in get_args(wanted):
            raise ValueError
        return value
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if wanted is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)  # a folder may be called 2017
    if type(value) is not wanted or (wanted in (int, float) and value and not 1e-30 <= abs(value) <= LARGEST[wanted]):
        raise ValueError
    return value


LARGEST = {int: 1 << 53, float: 1e30}
"""Larger numbers, and smaller ones than 1e-30, would overflow or vanish in single precision or 64-bit sizes."""


def _wanted(annotation: Any) -> str:
    bare, rules = split_annotation(annotation)
    text = " or ".join(_name(option) for option in _options(bare) if option is not NoneType)
    for rule in rules:
        text += f", {rule}" if isinstance(rule, Range | Increasing) else ""
    return text + (" or null" if NoneType in _options(bare) else "")


def _name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"{'one of ' * (len(get_args(kind)) > 1)}{', '.join(get_args(kind))}"
    if get_origin(kind) is list:
        return "a list, as in [a,b]"
    if is_dataclass(kind):
        return "a group of settings"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(kind, "a value")


def quoted(value: str) -> str:
    """Quote a value for Hydra's command line."""
    return "'" + value.replace("'", "\\'") + "'"


def typed(value: Any) -> str:
    """Format a value as typed on the command line."""
    if isinstance(value, list):
        return f"[{','.join(typed(item) for item in value)}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# ---- resuming --------------------------------------------------------------------------------------------------------


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
