"""Settings of the benchmarks: dataclasses that are filled from key=value arguments."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import numpy as np
from numpy.typing import NDArray

from lm.output.clusters.partition import check_cutoffs
from lm.system.errors import UserError

Settings = TypeVar("Settings")

READERS: dict[Any, tuple[Callable[[str], Any], str]] = {
    str: (str, ""),
    int: (int, "7"),
    bool: (lambda text: {"true": True, "false": False}[text.lower()], "true"),
    list[int]: (lambda text: [int(part) for part in _parts(text)], "2000,10000"),
    list[str]: (lambda text: _parts(text), "full,adaptive"),
}
"""How a value of each type is parsed, and an example of one."""


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.strip("[]").split(",") if part.strip()]


MOST = 1_000_000_000
"""Of any number; larger ones would fill the memory before anything is measured."""
HELP = "--help"


def split(words: Sequence[str]) -> dict[str, str]:
    """The arguments by key."""
    for word in words:
        if "=" not in word.lstrip("=") and word != HELP:
            raise UserError(f"arguments have the form key=value; got {word!r}. Try what=layers counts=zipf")
    pairs = (word.partition("=") for word in words)
    return {key: value for key, _, value in pairs}


def fill(schema: type[Settings], pairs: dict[str, str]) -> Settings:
    """The settings with these values. Rejects unknown keys, values of the wrong type and numbers below 1.

    Asked for help, it prints the keys with their defaults and exits.
    """
    types = get_type_hints(schema)
    if HELP in pairs:
        defaults = schema()
        print("Settings and their defaults:", *(f"{key}={_written(getattr(defaults, key))}" for key in types), sep="\n")
        raise SystemExit(0)
    values = {}
    for key, text in pairs.items():
        if key not in types:
            near = difflib.get_close_matches(key, types, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"The keys are: {', '.join(types)}."
            raise UserError(f"{key} is not a setting of this benchmark. {hint}")
        read, example = READERS[types[key]]
        try:
            values[key] = read(text)
        except (ValueError, KeyError):
            raise UserError(f"{key} cannot be {text!r}. Try {key}={example}") from None
        if types[key] is int and not 1 <= values[key] <= MOST:
            rule = "at least 1" if values[key] < 1 else f"at most {MOST:,}"
            raise UserError(f"{key} must be {rule}; got {values[key]}. Try {key}={example}")
    if "out" in values and not Path(values["out"]).absolute().parent.is_dir():
        raise UserError(f"out={values['out']} cannot be written: its folder does not exist. Try out=benchmark.json")
    return schema(**values)


def _written(value: Any) -> str:
    """As it would be given on the command line."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def keys_of(schema: type) -> set[str]:
    return {field.name for field in fields(schema)}


@dataclass
class CountsSettings:
    """Keys of every benchmark that needs word counts."""

    counts: str = "zipf"
    """A file with one count per line, or `zipf`."""
    vocab: int = 44_000
    """Number of words of the zipf counts."""
    cutoffs: list[int] = field(default_factory=lambda: [2000, 10_000])
    width: int = 512
    """Of the hidden states."""
    out: str = "benchmark.json"

    def read_counts(self) -> NDArray[np.int64]:
        """Decreasing counts; rejects cutoffs that do not fit them."""
        if self.counts == "zipf" and self.vocab < 2:
            raise UserError(f"vocab must be at least 2; got {self.vocab}. Try vocab=44000")
        if self.counts == "zipf":
            counts: NDArray[np.int64] = np.maximum(1, 10_000_000 // np.arange(1, self.vocab + 1))
        else:
            counts = -np.sort(-read_numbers("counts", self.counts))
        check_cutoffs(self.cutoffs, vocab_size=len(counts))
        return counts


def read_numbers(key: str, path: str) -> NDArray[np.int64]:
    """A file with one whole number per line."""
    try:
        return np.loadtxt(path, dtype=np.int64, ndmin=1)
    except OSError:
        raise UserError(f"{key}={path} cannot be read. Try counts=zipf and no classes") from None
    except ValueError as error:
        raise UserError(f"{key} must hold one whole number per line; {path!r}: {error}") from None


def draw_words(counts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Words drawn in proportion to their counts; always the same ones."""
    return np.random.default_rng(0).choice(len(counts), size=size, p=counts / counts.sum())
