"""Chooses the adaptive softmax's clusters and explains the choice (section 4.3 of the paper).

The objective is the predicted time of the layer as built: each tail is narrower than the one before it and has a
projection, and the head covers at least `head_coverage` of the training tokens. Without that minimum, several tails
would leave a small, fast head, which hurts perplexity. In the paper's objective all clusters have the same width, and
the head has no minimum.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lm.output.clusters.cost_model import BlockCost, CostModel, flops_model, load_model, measured_model
from lm.output.clusters.partition import MAX_TAILS, MIN_WIDTH, ClusteredConfig, cluster_sizes, projected_widths
from lm.system.devices import Precision
from lm.system.errors import UserError
from lm.system.jit import compiled, inlined

CLOSE_ENOUGH = 1.02
"""Choose the fewest tails whose predicted time is within this factor of the best."""


@dataclass(frozen=True)
class Cluster:
    """One cluster, as shown in the table that explains a choice."""

    words: int
    share: float
    """Share of the training tokens."""
    width: int
    seconds: float
    """Predicted seconds per training step."""


@dataclass(frozen=True)
class ClusterChoice:
    """Chosen cutoffs and their predicted times."""

    cutoffs: list[int]
    clusters: list[Cluster]
    full_seconds: float
    """Predicted time of the full softmax."""
    source: str
    """Origin of the cost model, shown in the log."""
    error: float
    """Mean relative error of the cost model's fit."""

    @property
    def seconds(self) -> float:
        return sum(cluster.seconds for cluster in self.clusters)

    def repeated(self, times: int) -> "ClusterChoice":
        """Return the choice with times for a step of `times` micro-batches."""
        clusters = [replace(cluster, seconds=times * cluster.seconds) for cluster in self.clusters]
        return replace(self, clusters=clusters, full_seconds=times * self.full_seconds)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ClusterChoice":
        """Inverse of `dataclasses.asdict`, for loading checkpoints."""
        return cls(**{**values, "clusters": [Cluster(**cluster) for cluster in values["clusters"]]})

    def rows(self) -> list[list[str]]:
        """Table rows for the terminal."""
        names = ["head", *(f"tail {i}" for i in range(1, len(self.clusters)))]
        return [
            [name, f"{c.words:,}", f"{c.share:.1%}", str(c.width), f"{1e3 * c.seconds:.1f}"]
            for name, c in zip(names, self.clusters, strict=True)
        ]

    HEADER = ("cluster", "words", "tokens", "width", "predicted ms")

    def summary(self) -> str:
        speed_up = (self.full_seconds + 1e-9) / (self.seconds + 1e-9)  # a fit may be 0 for a few words
        compared = f"{speed_up:.1f} times as fast as" if speed_up >= 1 else f"{1 / speed_up:.1f} times slower than"
        return (
            f"cutoffs {self.cutoffs}: output layer predicted at {1e3 * self.seconds:.1f} ms a step, {compared} the "
            f"full softmax ({self.source}, fit error {self.error:.0%}){'' if speed_up >= 1 else '. Try output=full.'}"
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
) -> ClusterChoice:
    """Resolve `output.cutoffs=auto`: find the fastest clusters for this vocabulary, width, batch and machine."""
    num_tails = None if config.num_tails == "auto" else int(config.num_tails)
    tails = projected_widths(width, num_tails=max(MAX_TAILS, num_tails or 0), min_width=config.min_width)
    widths = [width, *dict.fromkeys(tails)]  # tails of minimum width cost the same
    if config.cost_model == "flops":
        model = flops_model(widths)
    elif config.cost_model is not None:
        model = load_model(Path(config.cost_model))
    else:
        model = measured_model(widths, tokens, device, precision, cache_dir=cache_dir)
    costs = ClusterCosts(counts, width, tokens, model, config.head_coverage, config.min_width)
    choice = costs.choose(num_tails, max_tails=config.max_tails(width))
    if config.scores_all_words:  # same clusters as the adaptive softmax, but without its speed
        return costs.predict(choice.cutoffs, every_token=True)
    return choice


def counted_cutoffs(config: ClusteredConfig, *, counts: NDArray[Any], width: int) -> list[int]:
    """Resolve automatic cutoffs without a machine to measure: by counted operations, unless a cost model is given."""
    config = replace(config, cost_model=config.cost_model or "flops")
    options: dict[str, Any] = {"device": torch.device("cpu"), "precision": "fp32", "cache_dir": Path()}
    return choose_clusters(config, counts=counts, width=width, tokens=1, **options).cutoffs


@dataclass(frozen=True)
class ClusterCosts:
    """Predicts times of clusters for a vocabulary, and searches for the fastest ones."""

    counts: NDArray[Any]
    width: int
    tokens: int
    """Tokens per step."""
    model: CostModel
    head_coverage: float = 0.6
    min_width: int = MIN_WIDTH

    def choose(self, num_tails: int | None = None, *, max_tails: int = MAX_TAILS) -> ClusterChoice:
        """Find the cutoffs with the lowest predicted time; if `num_tails` is None, also choose the number of tails.

        A vocabulary too small for a tail gets `cutoffs=[]`, the full softmax.
        """
        shares = shares_of(self.counts)
        min_head = head_size(shares, coverage=self.head_coverage)
        possible = len(shares) - min_head
        if num_tails is not None and num_tails > possible:
            raise UserError(
                f"output.num_tails must leave a word for each tail: at most {possible} for a vocabulary of "
                f"{len(shares)} whose head has at least {min_head} words; got {num_tails}. Try output.num_tails=auto."
            )
        candidates = []
        for tail_count in [num_tails] if num_tails is not None else range(1, min(max_tails, possible) + 1):
            head, *tails = (astuple(self.model.block(i))[:5] for i in range(tail_count + 1))
            candidates.append(best_cutoffs(shares, tokens=self.tokens, head=head, tails=tails, min_head=min_head))
        fastest = min((seconds for _, seconds in candidates), default=0.0)
        cutoffs = next((cutoffs for cutoffs, seconds in candidates if seconds <= CLOSE_ENOUGH * fastest), [])
        return self.predict(cutoffs)

    def predict(self, cutoffs: Sequence[int], *, every_token: bool = False) -> ClusterChoice:
        """Predict times for given cutoffs; with `every_token`, all clusters are computed for all tokens."""
        shares, num_tails = shares_of(self.counts), len(cutoffs)
        sizes = cluster_sizes(cutoffs, vocab_size=len(shares))
        covered = np.add.reduceat(shares, [0, *cutoffs]).tolist()
        widths = [self.width, *projected_widths(self.width, num_tails=num_tails, min_width=self.min_width)]
        clusters = []
        for i in range(num_tails + 1):
            # The head sees every token and scores one entry per tail in addition to its words.
            words, share = (sizes[0] + num_tails, 1.0) if i == 0 else (sizes[i], covered[i])
            seconds = float(self.model.block(i).seconds(words, self.tokens if every_token else share * self.tokens))
            clusters.append(Cluster(sizes[i], covered[i], widths[i], seconds))
        full_seconds = float(self.model.block(0).seconds(len(shares), self.tokens))
        return ClusterChoice(list(cutoffs), clusters, full_seconds, self.model.source, self.model.error)


def head_size(shares: NDArray[np.float64], *, coverage: float) -> int:
    """Return how many of the most frequent words cover this share of the tokens."""
    # Slightly lower, because rounding in the sum could otherwise add a word when counts are equal.
    return min(len(shares), int(np.searchsorted(np.cumsum(shares), coverage * (1 - 1e-12))) + 1)


def shares_of(counts: NDArray[Any]) -> NDArray[np.float64]:
    """Return each word's share of the training tokens; uniform if all counts are 0."""
    counts = np.asarray(counts, dtype=np.float64)
    total = counts.sum()
    return counts / total if total > 0 else np.full(len(counts), 1 / len(counts))


# ---- the search for cutoffs ------------------------------------------------------------------------------------------
#
# Exact dynamic programming by divide and conquer. Words are sorted by decreasing count, so clusters are ranges and only
# the J cutoffs are free. F(b) is the share of tokens among the first b words. A tail over words a..b sees
# q = B (F(b) - F(a)) tokens and costs max(floor, c + p (b-a) q + w (b-a) + t q). A head of b words costs the same with
# q = B. These costs satisfy the quadrangle inequality: as the end of a tail moves right, its best start never moves
# left. So adding a tail costs O(V log V): solve the middle end by trying all possible starts, then solve each half with
# the starts on its side.


Floats = NDArray[np.float64]


def best_cutoffs(
    shares: Floats, *, tokens: float, head: Sequence[float], tails: Sequence[Sequence[float]], min_head: int
) -> tuple[list[int], float]:
    """Return the fastest cutoffs for one head and len(tails) tails, and their predicted seconds.

    `shares` are the words' shares of the tokens, decreasing. Costs are (floor, constant, per_pair, per_word,
    per_token). The head has at least `min_head` words and one entry per tail. No cluster is empty.
    """
    num_words, num_tails = len(shares), len(tails)
    assert 1 <= min_head <= num_words - num_tails
    cumulative = np.concatenate([[0.0], np.cumsum(shares)]) * tokens
    cost = BlockCost(*head).seconds(np.arange(num_words + 1) + num_tails, tokens)  # the head sees every token
    cost[:min_head] = np.inf
    starts = []
    for i, tail in enumerate(tails):
        last = i == num_tails - 1
        cost, start = _add_tail(cost, cumulative, np.asarray(tail, np.float64), last)
        starts.append(start)
    end = num_words
    cutoffs: list[int] = []
    for start in reversed(starts):
        end = int(start[end])
        cutoffs.insert(0, end)
    return cutoffs, float(cost[num_words])


@inlined
def _tail_cost(cumulative: Floats, cost: Floats, a: int, b: int) -> float:
    words, tokens = b - a, cumulative[b] - cumulative[a]
    return float(max(cost[0], cost[1] + cost[2] * words * tokens + cost[3] * words + cost[4] * tokens))


@compiled
def _add_tail(before: Floats, cumulative: Floats, cost: Floats, last: bool) -> tuple[Floats, NDArray[np.int64]]:
    """For each b, return the lowest cost of the first b words with one more tail ending at b, and that tail's start.

    For the last tail, only b = V is solved.
    """
    num_words = len(before) - 1
    after = np.full(num_words + 1, np.inf)
    start = np.zeros(num_words + 1, np.int64)
    # Each entry: ends lo..hi still to solve, and the range least..most of their best starts.
    stack = [(num_words if last else 1, num_words, 0, num_words - 1)]
    while stack:
        lo, hi, least, most = stack.pop()
        if lo > hi:
            continue
        middle = (lo + hi) // 2
        best, best_start = np.inf, min(least, middle - 1)
        for a in range(least, min(most, middle - 1) + 1):
            value = before[a] + _tail_cost(cumulative, cost, a, middle)
            if value < best:
                best, best_start = value, a
        after[middle], start[middle] = best, best_start
        stack.append((lo, middle - 1, least, best_start))
        stack.append((middle + 1, hi, best_start, most))
    return after, start
