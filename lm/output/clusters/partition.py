"""Vocabulary clusters: their settings, sizes and widths (section 4.3 of the paper).

Word ids are sorted by decreasing count, so a cluster is a range of ids. The head comes first. Tail i has 1/4^i of the
hidden width, but at least `output.min_width`: rare words have too few examples to benefit from more.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Annotated, Literal

from torch import Tensor

from lm.config.groups import Increasing, OutputConfig, Range, Width
from lm.system.console import counted
from lm.system.errors import UserError

SHRINK = 4
"""Each tail is narrower than the previous one by this factor."""
MIN_WIDTH = 16
"""Default minimum width of a tail: an 8-wide tail is as slow as a 16-wide one."""
MAX_TAILS = 3
"""Maximum number of tails chosen automatically: more save little time and hurt perplexity."""


@dataclass
class ClusteredConfig(OutputConfig):
    """Settings for layers that split the vocabulary, sorted by count, into a head and tails."""

    cutoffs: Annotated[Literal["auto"] | list[int], Increasing()] = "auto"
    """Word ids at which the tails begin, increasing; `auto` chooses them by predicted time on this machine."""
    num_tails: Annotated[Literal["auto"] | int, Range(least=1, most=1000)] = "auto"
    """With cutoffs=auto: `auto` uses the fewest tails within 2% of the fastest step, at most 3."""
    min_width: Width = MIN_WIDTH
    """Minimum width of a tail; tail i has 1/4^i of the hidden width."""
    head_coverage: Annotated[float, Range(above=0, below=1)] = 0.6
    """With cutoffs=auto: minimum share of training tokens in the head; a smaller head is faster."""
    cost_model: str | None = None
    """With cutoffs=auto: null measures this machine once, `flops` counts operations, PATH loads a saved model."""

    scores_all_words = False
    """Whether each token's loss needs the scores of all clusters, because one softmax covers all words."""

    @property
    def chosen_cutoffs(self) -> list[int]:
        """The cutoffs of a run, in which `auto` is replaced."""
        assert isinstance(self.cutoffs, list)
        return self.cutoffs

    def max_tails(self, width: int) -> int:
        """Maximum number of tails chosen automatically for hidden states of this width."""
        return MAX_TAILS


def check_cutoffs(cutoffs: Sequence[int], *, vocab_size: int, key: str = "output.cutoffs") -> list[int]:
    """Return the cutoffs as a list; raises UserError unless they increase and leave no cluster empty."""
    cutoffs = list(cutoffs)
    increasing = all(a < b for a, b in pairwise(cutoffs))
    if not increasing or any(not 0 < c < vocab_size for c in cutoffs):
        possible = sorted({c for c in cutoffs if 0 < c < vocab_size})
        hint = f" Try {key}={possible}.".replace(", ", ",") if possible else ""
        raise UserError(
            f"{key} must increase, stay above 0 and below the vocabulary ({vocab_size}); got {cutoffs}.{hint}"
        )
    return cutoffs


def cluster_sizes(cutoffs: Sequence[int], *, vocab_size: int) -> list[int]:
    """Number of words in the head and in each tail."""
    return [b - a for a, b in pairwise([0, *cutoffs, vocab_size])]


def projected_widths(width: int, *, num_tails: int, min_width: int = MIN_WIDTH) -> list[int]:
    """Widths of tails that project the full hidden state."""
    return [max(min(min_width, width), width // SHRINK**i) for i in range(1, num_tails + 1)]


def sliced_widths(width: int, *, num_tails: int) -> list[int]:
    """Widths of the head and tails as disjoint slices of the hidden state."""
    most = next(tails for tails in count() if width < SHRINK ** (tails + 1))
    if num_tails > most:
        raise UserError(
            f"a hidden width of {width} can be split into slices for at most {counted(most, 'tail')}; got {num_tails}. "
            f"Try {f'output.num_tails={most} or ' if most else ''}fewer output.cutoffs."
        )
    tails = [width // SHRINK**i for i in range(1, num_tails + 1)]
    return [width - sum(tails), *tails]


def consecutive(tables: Iterable[Tensor], *, first: int = 0) -> list[tuple[Tensor, list[int]]]:
    """Pair each table with its rows' word ids, which are consecutive across tables."""
    rows = []
    for table in tables:
        rows.append((table, list(range(first, first + len(table)))))
        first += len(table)
    return rows
