"""Perplexity by groups of words: by training frequency and by cluster."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.model.scoring import Score, perplexity
from lm.system.console import table


@dataclass(frozen=True)
class WordGroup:
    """The words with ids from `first` to before `end`; ids are sorted by decreasing count."""

    name: str
    first: int
    end: int

    def figures(self, score: Score) -> dict[str, Any]:
        tokens, nll = score.of_words(self.first, self.end)
        return {
            "name": self.name,
            "words": self.end - self.first,
            "share": tokens / score.tokens,
            "perplexity": perplexity(nll, tokens),
        }


def by_frequency(counts: NDArray[np.int64]) -> list[WordGroup]:
    """A group for each power of ten of the training count, unless it is empty."""
    most = len(str(int(counts[0]))) - 1
    groups = []
    first = 0
    for power in range(most, -1, -1):
        end = int(np.count_nonzero(counts >= 10**power)) if power else len(counts)
        if power == 0:
            name = "seen fewer than 10 times"
        elif power == most:
            name = f"seen {10**power:,} times or more"
        else:
            name = f"seen {10**power:,} to {10 ** (power + 1) - 1:,} times"
        if end > first:
            groups.append(WordGroup(name, first, end))
        first = end
    return groups


def by_cluster(cutoffs: Sequence[int], *, vocab_size: int) -> list[WordGroup]:
    """The output layer's head and tails, if it has them."""
    if not cutoffs:
        return []
    edges = enumerate(pairwise([0, *cutoffs, vocab_size]))
    return [WordGroup(f"tail {number}" if number else "head", first, end) for number, (first, end) in edges]


def groups_table(figures: dict[str, list[dict[str, Any]]]) -> str:
    """Share of the tokens and perplexity of each group, one pair of columns per split."""
    rows = []
    for same_group in zip(*figures.values(), strict=True):
        cells = ((f"{f['share']:.1%}", f"{f['perplexity']:.2f}" if f["share"] else "-") for f in same_group)
        first = same_group[0]
        rows.append([first["name"], f"{first['words']:,}", *(cell for pair in cells for cell in pair)])
    header = ["words", "number", *(column for name in figures for column in (f"{name} tokens", "perplexity"))]
    return table(rows, header=header)
