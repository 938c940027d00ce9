"""Frequent words first: how cutoffs cut the vocabulary into clusters, and how wide each cluster is (section 4.3).

Word ids are sorted by decreasing count, so a cluster is a range of ids. The head comes first; tail i gets 1/4^i of the
hidden width, because rare words cannot be learnt well and would waste more.
"""

from collections.abc import Iterable, Sequence
from itertools import count, pairwise

from torch import Tensor

from lm.system.console import counted
from lm.system.errors import UserError

SHRINK = 4
"""Each tail is this much narrower than the one before it; the paper's choice."""
NARROWEST = 8
"""Width below which a projection saves no time and only loses capacity."""


def check_cutoffs(cutoffs: Sequence[int], *, vocab_size: int, key: str = "output.cutoffs") -> list[int]:
    """The cutoffs as a list, or a UserError: they must increase and leave no cluster empty."""
    cutoffs = list(cutoffs)
    increasing = all(a < b for a, b in pairwise(cutoffs))
    if not increasing or any(not 0 < c < vocab_size for c in cutoffs):
        possible = sorted({c for c in cutoffs if 0 < c < vocab_size})
        hint = f" Try {key}={possible}".replace(", ", ",") if possible else ""
        raise UserError(
            f"{key} must increase, stay above 0 and below the vocabulary ({vocab_size}); got {cutoffs}.{hint}"
        )
    return cutoffs


def cluster_sizes(cutoffs: Sequence[int], *, vocab_size: int) -> list[int]:
    """Words of the head and of each tail."""
    return [b - a for a, b in pairwise([0, *cutoffs, vocab_size])]


def projected_widths(width: int, *, num_tails: int) -> list[int]:
    """Widths of the tails where each has its own projection of the whole hidden state."""
    if num_tails and width < NARROWEST:
        raise UserError(
            f"the hidden width must be at least {NARROWEST}, the narrowest cluster; got {width}. "
            f"Try model.hidden_size={NARROWEST * SHRINK**num_tails}"
        )
    return [max(NARROWEST, width // SHRINK**i) for i in range(1, num_tails + 1)]


def sliced_widths(width: int, *, num_tails: int) -> list[int]:
    """Widths of head and tails where they share the hidden state out in disjoint slices."""
    most = next(tails for tails in count() if width < SHRINK ** (tails + 1))
    if num_tails > most:
        enough = [f"a width of {SHRINK**num_tails}"] if num_tails < 9 else []
        fixes = [*enough, *([f"output.num_tails={most}"] if most else []), "fewer output.cutoffs"]
        raise UserError(
            f"a hidden width of {width} can be cut into slices for at most {counted(most, 'tail')}; got {num_tails}. "
            f"Try {' or '.join(fixes)}"
        )
    tails = [width // SHRINK**i for i in range(1, num_tails + 1)]
    return [width - sum(tails), *tails]


def consecutive(tables: Iterable[Tensor], *, first: int = 0) -> list[tuple[Tensor, list[int]]]:
    """The words of the rows of tables that hold one after the other in the order of their ids."""
    found = []
    for table in tables:
        found.append((table, list(range(first, first + len(table)))))
        first += len(table)
    return found
