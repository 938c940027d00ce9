"""key=value arguments of the benchmarks, made into a dataclass whose fields are the known keys."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

from lm.system.errors import UserError

Settings = TypeVar("Settings")

READERS: dict[Any, Callable[[str], Any]] = {
    str: str,
    int: int,
    bool: lambda text: {"true": True, "false": False}[text.lower()],
    list[int]: lambda text: [int(part) for part in text.strip("[]").split(",") if part.strip()],
    list[str]: lambda text: [part.strip() for part in text.strip("[]").split(",") if part.strip()],
}
EXAMPLES = {int: "7", bool: "true", list[int]: "2000,10000", list[str]: "full,adaptive"}


def split(words: Sequence[str]) -> dict[str, str]:
    """The arguments by key; refuses what is not key=value."""
    for word in words:
        if "=" not in word.strip("="):
            raise UserError(f"arguments have the form key=value; got {word!r}. Try what=layers counts=zipf")
    return dict(word.split("=", 1) for word in words)


def fill(schema: type[Settings], pairs: dict[str, str]) -> Settings:
    """The settings with these values; refuses unknown keys, values of the wrong type and numbers below 1."""
    types = get_type_hints(schema)
    known = [field.name for field in fields(schema)]  # type: ignore[arg-type]
    values = {}
    for key, text in pairs.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"The keys are: {', '.join(known)}."
            raise UserError(f"{key} is not a setting of this benchmark. {hint}")
        try:
            values[key] = READERS[types[key]](text)
        except (ValueError, KeyError):
            raise UserError(f"{key} cannot be {text!r}. Try {key}={EXAMPLES[types[key]]}") from None
        if types[key] is int and values[key] < 1:
            raise UserError(f"{key} must be at least 1; got {values[key]}.")
    return schema(**values)
