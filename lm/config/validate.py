"""Convert composed configs to typed settings, reporting all mistakes together."""

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf

from lm.config.registry import find_plugin, is_group, plugin_names
from lm.config.rules import Range
from lm.system.errors import UserError

Schema = TypeVar("Schema")


def make_config(values: DictConfig | Mapping[str, Any], schema: type[Schema]) -> Schema:
    """Convert composed values to typed settings; raises one UserError that lists everything wrong."""
    plain = cast(
        "dict[str, Any]",
        OmegaConf.to_container(values, resolve=True) if isinstance(values, DictConfig) else dict(values),
    )
    problems = list(find_problems(plain, schema))
    if problems:
        raise UserError("\n".join(problems))
    return cast(Schema, _build(plain, schema))


def plain_values(config: Any) -> Any:
    """Inverse of `make_config`: nested dictionaries of plain values, for YAML and checkpoints."""
    if is_dataclass(config):
        return {f.name: plain_values(getattr(config, f.name)) for f in fields(config)}
    return config.value if isinstance(config, Enum) else config


def default_values(schema: type) -> dict[str, Any]:
    """Return the plain default of every setting that has one."""
    values = {}
    for field in fields(schema):
        if field.default is not MISSING:
            values[field.name] = plain_values(field.default)
        elif field.default_factory is not MISSING:
            values[field.name] = plain_values(field.default_factory())
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
            inner = (values or {}).get(name)
            yield from all_settings(settings_class(name, inner, cast(type, bare)), inner, prefix=f"{prefix}{name}.")
        else:
            yield Setting(prefix + name, rules, defaults.get(name, MISSING), schema)


def find_problems(values: Any, schema: type, *, prefix: str = "") -> Iterator[str]:
    """Yield a line for each key that is unknown, missing, of the wrong type or out of range."""
    if not isinstance(values, Mapping):
        yield f"{prefix.rstrip('.')} must be a group of settings; got {values!r}."
        return
    annotations = get_type_hints(schema, include_extras=True)
    for key in values:
        if key not in annotations:
            yield unknown_key(f"{prefix}{key}", (prefix + name for name in annotations))
    found_any = False
    for name, annotation in annotations.items():
        if name not in values and name in default_values(schema):
            continue
        for problem in _field_problems(values, schema, name, annotation, prefix=prefix):
            found_any = True
            yield problem
    # Checks across fields need an object with valid fields.
    if not found_any and hasattr(schema, "problems"):
        yield from cast(Any, _build(values, schema)).problems()


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


def _field_problems(
    values: Mapping[str, Any], schema: type, name: str, annotation: Any, *, prefix: str
) -> Iterator[str]:
    key = prefix + name
    if name not in values:
        yield f"{key} is missing; it must be {_wanted(annotation)}."
        return
    bare, rules = split_annotation(annotation)
    value = values[name]
    if is_dataclass(bare):
        names = plugin_names(key) if _is_plugin(key, cast(type, bare)) else []
        if names and isinstance(value, Mapping) and value.get("name") not in names:
            yield f"{key}.name must be one of {', '.join(names)}; got {value.get('name')!r}. Choose it with {key}=NAME."
            return
        yield from find_problems(value, settings_class(key, value, cast(type, bare)), prefix=f"{key}.")
        return
    try:
        converted = _convert(value, bare)
        valid = converted is None or all(rule.holds(converted) for rule in rules if isinstance(rule, Range))
    except ValueError:
        valid = False
    if not valid:
        defaults = default_values(schema)
        hint = f" Try {key}={typed(defaults[name])}." if name in defaults else ""
        yield f"{key} must be {_wanted(annotation)}; got {value!r}.{hint}"


def _build(values: Mapping[str, Any], schema: type) -> Any:
    """Build the dataclass from valid values."""
    made = {}
    for name, annotation in get_type_hints(schema, include_extras=True).items():
        if name not in values:  # has a default: older checkpoints lack newer settings
            continue
        bare, _ = split_annotation(annotation)
        value = values[name]
        if is_dataclass(bare):
            made[name] = _build(value, settings_class(name, value, cast(type, bare)))
        else:
            made[name] = _convert(value, bare)
    return schema(**made)


def _is_plugin(key: str, declared: type) -> bool:
    """Whether a group names a plug-in; some commands have unrelated groups of the same name."""
    return is_group(key) and "name" in get_type_hints(declared)


def settings_class(key: str, value: Any, declared: type) -> type:
    """Return a group's settings class: that of its plug-in, or the declared one."""
    if _is_plugin(key, declared) and isinstance(value, Mapping):
        return find_plugin(key, value["name"]).settings
    return declared


def split_annotation(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    if get_origin(annotation) is Annotated:
        bare, *rules = get_args(annotation)
        return bare, tuple(rules)
    return annotation, ()


def _convert(value: Any, wanted: Any) -> Any:
    """Convert a value to its declared type, or raise ValueError; never rounds or turns numbers into booleans."""
    if isinstance(wanted, UnionType):
        options = get_args(wanted)
        if value is None and NoneType in options:
            return None
        return _convert(value, next(option for option in options if option is not NoneType))
    if get_origin(wanted) is list:
        if not isinstance(value, list):
            raise ValueError
        return [_convert(item, get_args(wanted)[0]) for item in value]
    if wanted is Any:
        return value
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        return value if isinstance(value, wanted) else wanted(value)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if wanted is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)  # a folder may be called 2017
    if type(value) is not wanted or (wanted is float and not math.isfinite(value)):
        raise ValueError
    return value


def _wanted(annotation: Any) -> str:
    bare, rules = split_annotation(annotation)
    options = get_args(bare) if isinstance(bare, UnionType) else (bare,)
    main = next(option for option in options if option is not NoneType)
    if isinstance(main, type) and issubclass(main, Enum):
        text = "one of " + ", ".join(member.value for member in main)
    elif get_origin(main) is list:
        text = "a list, as in [a,b]"
    elif is_dataclass(main):
        text = "a group of settings"
    else:
        text = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(main, "a value")
    for rule in rules:
        text += f", {rule}" if isinstance(rule, Range) else ""
    return text + (" or null" if NoneType in options else "")


def quoted(value: str) -> str:
    """Quote a value for Hydra's command line."""
    return "'" + value.replace("'", "\\'") + "'"


def typed(value: Any) -> str:
    """Format a value as typed on the command line."""
    if isinstance(value, list):
        return f"[{','.join(typed(item) for item in value)}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
