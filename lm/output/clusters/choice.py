"""Chooses the clusters of the adaptive softmax, and says why (section 4.3 of the paper).

Two objectives. `as_built` is the predicted time of the layer as it is built: every tail at its own width, with its
projection, and a head that covers at least `head_coverage` of the training tokens. `paper` is the paper's: all clusters
equally wide, no such floor. The floor keeps the head from shrinking, where there are several tails, to the few words
that would be fastest.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lm.output.clusters.cost_model import BlockCost, CostModel, flops_model, load_model, measured_model
from lm.output.clusters.partition import NARROWEST, cluster_sizes, projected_widths
from lm.output.clusters.search import best_cutoffs
from lm.output.clusters.settings import MOST_TAILS, ClusteredConfig, Objective
from lm.system.console import markdown_table
from lm.system.errors import UserError
from lm.system.precision import Precision

CLOSE_ENOUGH = 1.02
"""The fewest tails are taken whose predicted time is within this factor of the best."""


@dataclass(frozen=True)
class Cluster:
    """One row of the table that explains a choice."""

    words: int
    share: float
    """Of the training tokens."""
    width: int
    seconds: float
    """Predicted, per training step."""


@dataclass(frozen=True)
class ClusterChoice:
    """Cutoffs, with the prediction they were chosen by."""

    cutoffs: list[int]
    clusters: list[Cluster]
    full_seconds: float
    """Predicted time of the full softmax."""
    source: str
    error: float

    @property
    def seconds(self) -> float:
        return sum(cluster.seconds for cluster in self.clusters)

    def repeated(self, times: int) -> "ClusterChoice":
        """The same choice for a step that computes the layer `times` times."""
        clusters = [replace(cluster, seconds=times * cluster.seconds) for cluster in self.clusters]
        return replace(self, clusters=clusters, full_seconds=times * self.full_seconds)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for checkpoints and reports."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ClusterChoice":
        return cls(**{**values, "clusters": [Cluster(**cluster) for cluster in values["clusters"]]})

    def rows(self) -> list[list[str]]:
        """For the terminal and for TensorBoard."""
        names = ["head", *(f"tail {i}" for i in range(1, len(self.clusters)))]
        return [
            [name, f"{c.words:,}", f"{c.share:.1%}", str(c.width), f"{1e3 * c.seconds:.1f}"]
            for name, c in zip(names, self.clusters, strict=True)
        ]

    def as_markdown(self) -> str:
        return f"{markdown_table(self.rows(), header=self.HEADER)}\n\n{self.summary()}"

    HEADER = ("cluster", "words", "tokens", "width", "predicted ms")

    def summary(self) -> str:
        speed_up = self.full_seconds / self.seconds
        return (
            f"cutoffs {self.cutoffs}: predicted {1e3 * self.seconds:.1f} ms a step, {speed_up:.1f} times as fast as "
            f"the full softmax ({self.source}, fit error {self.error:.0%})"
        )


def choose_clusters(
    config: ClusteredConfig,
    *,
    counts: NDArray[Any],
    width: int,
    tokens: int,
    device: torch.device,
    precision: Precision,
    cache_dir: Path,
    notice: Callable[[str], None],
) -> ClusterChoice:
    """What `output.cutoffs=auto` means: the best clusters for this vocabulary, width, batch and machine."""
    num_tails = None if config.num_tails == "auto" else int(config.num_tails)
    widths = [width, *projected_widths(width, num_tails=max(MOST_TAILS, num_tails or 0))]
    # Beyond the narrowest width all tails are alike.
    widths = widths[: next((i + 1 for i, w in enumerate(widths) if w == NARROWEST), len(widths))]
    if config.cost_model == "flops":
        model = flops_model(widths)
    elif config.cost_model is not None:
        model = load_model(Path(config.cost_model))
    else:
        model = measured_model(widths, tokens, device, precision, cache_dir=cache_dir, notice=notice)
    costs = ClusterCosts(counts, width, tokens, model, config.head_coverage)
    choice = costs.choose(num_tails, objective=config.objective, most_tails=config.most_tails(width))
    if config.scores_all_words:  # it shares the adaptive layer's clusters, not its speed
        return costs.predict(choice.cutoffs, objective=config.objective, every_token=True)
    return choice


@dataclass(frozen=True)
class ClusterCosts:
    """What clusters of a vocabulary cost in a layer of one width: predicted, and the least of all."""

    counts: NDArray[Any]
    width: int
    tokens: int
    """Of a step."""
    model: CostModel
    head_coverage: float = 0.75

    def choose(
        self, num_tails: int | None = None, *, objective: Objective = Objective.as_built, most_tails: int = MOST_TAILS
    ) -> ClusterChoice:
        """The cutoffs with the least predicted time; `num_tails=None` chooses their number too, up to `most_tails`.

        A vocabulary too small for any tail gets none: `cutoffs=[]`, which is the full softmax.
        """
        shares = shares_of(self.counts)
        least_head = 1 if objective is Objective.paper else head_size(shares, coverage=self.head_coverage)
        possible = len(shares) - least_head
        if num_tails is not None and num_tails > possible:
            raise UserError(
                f"output.num_tails must leave each tail a word: at most {possible} for a vocabulary of {len(shares)} "
                f"whose head has at least {least_head} words; got {num_tails}. Try output.num_tails=auto"
            )
        numbers = [num_tails] if num_tails is not None else list(range(1, min(most_tails, possible) + 1))
        found = []
        for number in numbers:
            head, *tails = (astuple(block)[:5] for block in self._blocks(objective, num_tails=number))
            found.append(best_cutoffs(shares, tokens=self.tokens, head=head, tails=tails, least_head=least_head))
        least = min((seconds for _, seconds in found), default=0.0)
        cutoffs = next((cutoffs for cutoffs, seconds in found if seconds <= CLOSE_ENOUGH * least), [])
        return self.predict(cutoffs, objective=objective)

    def predict(
        self, cutoffs: Sequence[int], *, objective: Objective = Objective.as_built, every_token: bool = False
    ) -> ClusterChoice:
        """What the model predicts for given cutoffs; with `every_token`, of tails that are computed for all tokens."""
        shares, num_tails = shares_of(self.counts), len(cutoffs)
        sizes = cluster_sizes(cutoffs, vocab_size=len(shares))
        covered = np.add.reduceat(shares, [0, *cutoffs]).tolist()
        widths = [self.width, *projected_widths(self.width, num_tails=num_tails)]
        if objective is Objective.paper:
            widths = [self.width] * (num_tails + 1)
        clusters = []
        for number, block in enumerate(self._blocks(objective, num_tails=num_tails)):
            # The head sees every token, and scores one entry per tail besides its words.
            words, share = (sizes[0] + num_tails, 1.0) if number == 0 else (sizes[number], covered[number])
            seconds = float(block.seconds(words, self.tokens if every_token else share * self.tokens))
            clusters.append(Cluster(sizes[number], covered[number], widths[number], seconds))
        full_seconds = float(self.model.block(0).seconds(len(shares), self.tokens))
        return ClusterChoice(list(cutoffs), clusters, full_seconds, self.model.source, self.model.error)

    def _blocks(self, objective: Objective, *, num_tails: int) -> list[BlockCost]:
        return [self.model.block(0 if objective is Objective.paper else number) for number in range(num_tails + 1)]


def head_size(shares: NDArray[np.float64], *, coverage: float) -> int:
    """The fewest of the most frequent words that make up `coverage` of the tokens."""
    # A hair less than asked for, or rounding in the sum would demand one word more of equal counts.
    return min(len(shares), int(np.searchsorted(np.cumsum(shares), coverage * (1 - 1e-12))) + 1)


def shares_of(counts: NDArray[Any]) -> NDArray[np.float64]:
    """Of the training tokens; equal ones where nothing was counted."""
    counts = np.asarray(counts, dtype=np.float64)
    total = counts.sum()
    return counts / total if total > 0 else np.full(len(counts), 1 / len(counts))
