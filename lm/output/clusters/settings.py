"""Settings of the layers that cut the vocabulary, sorted by count, into a head and tails."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Annotated, Any

from lm.config.groups import OutputConfig
from lm.config.rules import Range
from lm.output.clusters.partition import SHRINK

MOST_TAILS = 3
"""The number of tails is chosen among 1 to this: more save little time and cost perplexity."""
LEAST_WIDTH = 16
"""Of a third tail: a narrower one saves a few per cent of a step and costs more than that in perplexity."""


class Objective(Enum):
    """What automatic clusters minimise; see `choice.py`."""

    as_built = "as_built"
    paper = "paper"


@dataclass
class ClusteredConfig(OutputConfig):
    """Layers that cut the vocabulary, sorted by count, into a head and tails."""

    cutoffs: Any = "auto"
    """Word ids at which the tails begin, increasing; `auto` chooses them by predicted time on this machine."""
    num_tails: Any = "auto"
    """For `auto`: `auto` takes the fewest tails within 2 % of the fastest, 3 at most, the third at least 16 wide."""
    objective: Objective = Objective.as_built
    """For `auto`: the layer as it is built, or the paper's equal widths (for its figures)."""
    head_coverage: Annotated[float, Range(above=0, below=1)] = 0.75
    """For `auto`: least share of the training tokens in the head; a smaller head is faster."""
    cost_model: str | None = None
    """For `auto`: null measures this machine once, `flops` counts operations instead, or the PATH of a saved model."""

    scores_all_words = False
    """Whether a token's loss needs the scores of every cluster, as where one softmax is over all words."""

    def problems(self) -> Iterator[str]:
        cutoffs, num_tails = self.cutoffs, self.num_tails
        listed = isinstance(cutoffs, list) and all(type(c) is int and c > 0 for c in cutoffs)
        if cutoffs != "auto" and not (listed and all(a < b for a, b in pairwise(cutoffs))):
            yield (
                f"output.cutoffs must be auto or a list of increasing positive word ids; got {cutoffs!r}. "
                "Try output.cutoffs=auto"
            )
        if num_tails != "auto" and not (type(num_tails) is int and num_tails >= 1):
            yield (
                f"output.num_tails must be auto or a number of tails from 1 on; got {num_tails!r}. "
                "Try output.num_tails=auto"
            )

    def most_tails(self, width: int) -> int:
        """How many tails may be chosen automatically for hidden states of this width."""
        return MOST_TAILS if width // SHRINK**MOST_TAILS >= LEAST_WIDTH else MOST_TAILS - 1
