"""Validation rules for a field's annotation."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated


@dataclass(frozen=True)
class Range:
    """Bounds of a number; None leaves a side open."""

    least: float | None = None
    above: float | None = None
    below: float | None = None
    most: float | None = None

    def __str__(self) -> str:
        bounds = {"at least": self.least, "above": self.above, "below": self.below, "at most": self.most}
        return " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)

    def holds(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and (self.most is None or value <= self.most)
        )


@dataclass(frozen=True)
class Increasing:
    """Requires increasing positive numbers, at least `fewest` of them."""

    fewest: int = 0

    def __str__(self) -> str:
        return "of increasing positive numbers"

    def holds(self, values: list[int]) -> bool:
        return len(values) >= self.fewest and all(a < b for a, b in pairwise([0, *values]))


class MayBeEmpty:
    """Marks a text that may be empty."""


class Resumable:
    """Marks a setting that may differ when a run is resumed: limits, logging, device."""


Count = Annotated[int, Range(least=1)]
Width = Annotated[int, Range(least=1, most=1e9)]
"""Width of a vector or matrix; the bound keeps sizes within 64 bits."""
OptionalCount = Annotated[int | None, Range(least=1)]
OptionalSeconds = Annotated[float | None, Range(above=0)]
Rate = Annotated[float, Range(least=0, below=1)]
OptionalRate = Annotated[float | None, Range(least=0, below=1)]
Penalty = Annotated[float, Range(least=0)]
