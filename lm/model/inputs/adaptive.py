"""Adaptive input: wide vectors for frequent words, narrow vectors projected to full width for rare ones.

This applies the adaptive softmax's idea (section 4) to the input, as in Baevski and Auli (2019). With three tails, a
table of 793,470 words of width 256 shrinks from 203 to 8 million numbers. A training step projects each distinct word
in the batch once.

Shapes: U distinct words in a batch, u of them in a cluster, E width, e width of a cluster.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from lm.config.groups import Increasing, InputConfig, OutputConfig, plugin
from lm.data.batches import DistinctWords
from lm.model.base import Input, InputSizes
from lm.optim.sparse_table import SparseTable
from lm.output.clusters.choice import head_size, shares_of
from lm.output.clusters.partition import SHRINK, ClusteredConfig, check_cutoffs, cluster_sizes, consecutive

MAX_TAILS = 3
"""Maximum number of automatic tails."""
MIN_WIDTH = 4
"""Minimum width of word vectors; narrower ones save little memory and learn little."""


@dataclass
class AdaptiveInputConfig(InputConfig):
    """Word vectors that get narrower as words get rarer."""

    name: str = "adaptive"
    cutoffs: Annotated[Literal["output", "auto"] | list[int], Increasing(fewest=1)] = "output"
    """Word ids at which narrower vectors begin; `output` uses the output layer's, `auto` depends on the counts."""

    tied_with = "adaptive"

    def check_compatible(self, output: OutputConfig, *, tied: bool) -> Iterator[str]:
        yield from super().check_compatible(output, tied=tied)
        if self.cutoffs == "output" and not isinstance(output, ClusteredConfig):
            yield (
                "input.cutoffs=output needs an output layer with cutoffs, such as output=adaptive; got "
                f"output={output.name}. Try input.cutoffs=auto."
            )
        if tied and self.cutoffs != "output":
            yield (
                "model.tie=true needs input.cutoffs=output, because input and output share their clusters; got "
                f"{self.cutoffs!r}. Try input.cutoffs=output."
            )
        if tied and not getattr(output, "shortlist", True):
            yield "model.tie=true needs output.shortlist=true; got false. Try output.shortlist=true."


@plugin("input", "adaptive", AdaptiveInputConfig)
class AdaptiveInput(Input):
    """Full-width vectors for the head, and tail vectors projected to the same width.

    If tied, the vectors are the output layer's, cluster by cluster, and the input owns only the projections. Vectors
    start at the same scale in all clusters.
    """

    def __init__(
        self,
        *,
        width: int,
        vocab_size: int,
        cutoffs: Sequence[int],
        sparse: bool = False,
        shared: Callable[[], list[Tensor]] | None = None,
    ) -> None:
        """`shared` returns another layer's word vectors by cluster."""
        super().__init__()
        self.width, self.shared = width, shared
        self.cutoffs = check_cutoffs(cutoffs, vocab_size=vocab_size, key="input.cutoffs")
        self.sizes = cluster_sizes(self.cutoffs, vocab_size=vocab_size)
        self.starts = [0, *self.cutoffs]
        if shared is None:
            self.widths = [min(width, max(MIN_WIDTH, width // SHRINK**i)) for i in range(len(self.sizes))]
        else:
            self.widths = [table.shape[1] for table in shared()]
        shapes = zip(self.sizes, self.widths, strict=True)
        tables = () if shared is not None else (SparseTable(size, narrow, sparse=sparse) for size, narrow in shapes)
        self.tables = nn.ModuleList(tables)
        self.projections = nn.ParameterList(nn.Parameter(torch.empty(width, narrow)) for narrow in self.widths[1:])
        for table in self.tables:
            nn.init.uniform_(table.get_parameter("weight"), -0.1, 0.1)
        for projection in self.projections:
            # The output layer's vectors start in U(+-1/sqrt(width)), the input's in U(-0.1, 0.1), in all clusters.
            bound = (3 / (width if shared is not None else projection.shape[1])) ** 0.5
            nn.init.uniform_(projection, -bound, bound)

    @classmethod
    def build(cls, settings: AdaptiveInputConfig, sizes: InputSizes) -> "AdaptiveInput":
        cutoffs = settings.cutoffs
        if cutoffs == "auto":
            cutoffs = automatic_cutoffs(sizes.vocabulary.counts)
        return cls(
            width=sizes.width,
            vocab_size=len(sizes.vocabulary),
            cutoffs=sizes.output.cutoffs if cutoffs == "output" else cutoffs,
            sparse=sizes.sparse,
            shared=sizes.output.word_vectors if sizes.tied else None,
        )

    def rows_by_word(self) -> list[tuple[Tensor, list[int]]]:
        return consecutive(table.get_parameter("weight") for table in self.tables)

    def plan(self, distinct_U: Tensor) -> list[int]:
        """Count the distinct words in each cluster."""
        edges = torch.searchsorted(distinct_U, torch.tensor(self.cutoffs, device="cpu")).tolist()
        return [b - a for a, b in pairwise([0, *edges, len(distinct_U)])]

    def forward(self, words: Tensor, distinct: DistinctWords | None = None) -> Tensor:
        if distinct is None:
            return self._look_up(words)
        in_clusters = torch.split(distinct.words_U, distinct.plan)
        clusters = enumerate(zip(self.starts, in_clusters, strict=True))
        parts = [self._widened(self._rows(cluster, words_u - start), cluster) for cluster, (start, words_u) in clusters]
        return F.embedding(distinct.inverse, torch.cat(parts))

    def weights(self) -> list[Tensor]:
        """Return each cluster's vectors; those of a shared head are followed by rows for its tails."""
        return self.shared() if self.shared is not None else [table.get_parameter("weight") for table in self.tables]

    def _rows(self, cluster: int, rows_u: Tensor) -> Tensor:
        if self.shared is not None:
            return F.embedding(rows_u, self.shared()[cluster])
        vectors_ue: Tensor = self.tables[cluster](rows_u, rows_u)
        return vectors_ue

    def _widened(self, vectors: Tensor, cluster: int) -> Tensor:
        if cluster == 0:
            return vectors
        return F.linear(vectors, self.projections[cluster - 1]).to(vectors.dtype)

    def _look_up(self, words: Tensor) -> Tensor:
        """Look up each word in every cluster, without a plan and without synchronization."""
        tables, result = self.weights(), torch.empty(0)
        for cluster, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            row = (words - start).clamp(0, size - 1)
            vectors = self._widened(F.embedding(row, tables[cluster]), cluster)
            result = vectors if cluster == 0 else torch.where((words >= start)[..., None], vectors, result)
        return result


def automatic_cutoffs(counts: NDArray[Any]) -> list[int]:
    """Cutoffs after which 1/4, 1/16 and 1/64 of training tokens remain; each tail's vectors are a quarter as wide."""
    shares = shares_of(counts)
    left = accumulate(np.full(MAX_TAILS, 1 / SHRINK), np.multiply)
    cutoffs = dict.fromkeys(head_size(shares, coverage=1 - rest) for rest in left)
    return [cutoff for cutoff in cutoffs if cutoff < len(shares)]
