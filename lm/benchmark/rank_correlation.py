"""Spearman's correlation: do two measurements put things in the same order?"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Pearson's correlation of the ranks, from -1 to 1; undefined (nan) where either is constant."""
    a, b = (ranks(values) - (len(values) - 1) / 2 for values in (one, other))
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale else float("nan")


def ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Ranks from 0; equal values share the mean of theirs."""
    _, group, sizes = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    last = np.cumsum(sizes)
    middle: NDArray[np.float64] = last - (sizes + 1) / 2
    return middle[group]
