"""Word counts to measure with, from a file or made up."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lm.system.errors import UserError


@dataclass
class CountsSettings:
    """Keys of every benchmark that measures with word counts."""

    counts: str = "zipf"
    """A file with one count per line, or `zipf`."""
    vocab: int = 44_000
    """Words of the zipf counts."""

    def read_counts(self) -> NDArray[np.int64]:
        return read_counts(self.counts, vocab=self.vocab)


def read_counts(source: str, *, vocab: int) -> NDArray[np.int64]:
    """Decreasing counts, from a file or, for `zipf`, by Zipf's law over `vocab` words."""
    if source == "zipf":
        return np.maximum(1, 10_000_000 // np.arange(1, vocab + 1))
    return -np.sort(-read_numbers("counts", source))


def draw_words(counts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Words drawn by their counts, the same each time."""
    return np.random.default_rng(0).choice(len(counts), size=size, p=counts / counts.sum())


def read_numbers(key: str, path: str) -> NDArray[np.int64]:
    """A file with one whole number per line."""
    try:
        return np.loadtxt(path, dtype=np.int64, ndmin=1)
    except OSError:
        raise UserError(f"{key} names no file that can be read: {path!r}. Try counts=zipf and no classes") from None
    except ValueError as error:
        raise UserError(f"{key} must hold one whole number per line; {path!r}: {error}") from None
