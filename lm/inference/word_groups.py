"""Perplexity by word group: by training frequency and by cluster."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.model.scoring import Score, perplexity
from lm.system.console import table

Groups = dict[str, range]
"""Word ids of each group; ids are sorted by decreasing count."""


def by_frequency(counts: NDArray[np.int64]) -> Groups:
    """Group words by the power of ten of their training count; omit empty groups."""
    powers = range(len(str(int(counts[0]))) - 1, 0, -1)
    ends = [int(np.count_nonzero(counts >= 10**power)) for power in powers]
    names = [f"seen {10**power:,} to {10 ** (power + 1) - 1:,} times" for power in powers]
    names[:1] = [f"seen {10**power:,} times or more" for power in powers[:1]]
    groups = zip([*names, "seen fewer than 10 times"], pairwise([0, *ends, len(counts)]), strict=True)
    return {name: range(first, end) for name, (first, end) in groups if end > first}


def by_cluster(cutoffs: Sequence[int], *, vocab_size: int) -> Groups:
    """Group words into the output layer's head and tails; empty if it has no clusters."""
    edges = enumerate(pairwise([0, *cutoffs, vocab_size])) if cutoffs else ()
    return {f"tail {i}" if i else "head": range(first, end) for i, (first, end) in edges}


def score_groups(score: Score, groups: Groups) -> list[dict[str, Any]]:
    """Return each group's size, token share and perplexity as plain values."""
    scored = [(name, len(ids), *score.of_words(ids.start, ids.stop)) for name, ids in groups.items()]
    return [
        {"name": name, "words": words, "share": tokens / score.tokens, "perplexity": perplexity(nll, tokens)}
        for name, words, tokens, nll in scored
    ]


def groups_table(groups: dict[str, list[dict[str, Any]]]) -> str:
    """Table of each group's token share and perplexity, with two columns per split."""
    rows = []
    for same_group in zip(*groups.values(), strict=True):
        cells = ((f"{g['share']:.1%}", f"{g['perplexity']:.2f}" if g["share"] else "-") for g in same_group)
        first = same_group[0]
        rows.append([first["name"], f"{first['words']:,}", *(cell for pair in cells for cell in pair)])
    header = ["words", "number", *(column for split in groups for column in (f"{split} tokens", "perplexity"))]
    return table(rows, header=header)
