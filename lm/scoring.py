"""Exact perplexity of a split, the same for every batch size.

A split is cut into `streams` contiguous pieces. Each but the first is warmed up on the tokens before it, unscored; the
first starts from `</s>` and a zero state. Every token is scored exactly once. The number of pieces is part of the
figure's definition and is printed beside it; how many are computed at once is not.

Shapes: T steps, B pieces computed at once, S pieces.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.console import Progress
from lm.interrupt import StopRequest
from lm.model.language_model import LanguageModel
from lm.output.base import IGNORE_INDEX
from lm.ranks import Ranks

WARM_UP = 128
"""Tokens each piece reads before its own, to bring the state into context."""
CHUNK = 64
"""Steps computed at once; bounds the memory of the output layer and changes no figure."""


@dataclass(frozen=True)
class Score:
    """What a model makes of a split; sums of negative log-likelihood in nats."""

    tokens: int
    nll: float
    unk_tokens: int
    unk_nll: float
    streams: int
    seconds: float
    clusters: tuple[tuple[int, float], ...] = ()
    """Tokens and their negative log-likelihood by the target's cluster, head first, for layers with cutoffs."""

    @property
    def loss(self) -> float:
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        return perplexity(self.nll, self.tokens)

    @property
    def perplexity_without_unk(self) -> float:
        return perplexity(self.nll - self.unk_nll, self.tokens - self.unk_tokens)

    @property
    def oov_rate(self) -> float:
        return self.unk_tokens / self.tokens

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def by_cluster(self) -> dict[str, float]:
        """Each cluster's share of the tokens and its loss, under their tags; a cluster without tokens has no loss."""
        figures = {}
        for number, (tokens, nll) in enumerate(self.clusters):
            figures[f"output/cluster_{number}/share"] = tokens / self.tokens
            figures[f"output/cluster_{number}/loss"] = nll / tokens if tokens else math.nan
        return figures

    def as_dict(self) -> dict[str, Any]:
        return {
            "perplexity": self.perplexity,
            "perplexity_without_unk": self.perplexity_without_unk,
            "oov_rate": self.oov_rate,
            "tokens": self.tokens,
            "streams": self.streams,
            "tokens_per_second": self.tokens_per_second,
        }


def perplexity(nll: float, tokens: int) -> float:
    """exp(nll / tokens); infinite where that overflows, undefined without tokens."""
    if tokens == 0:
        return math.nan
    return math.exp(nll / tokens) if nll / tokens < 700 else math.inf


@torch.no_grad()
def score(
    model: LanguageModel,
    tokens: NDArray[Any],
    *,
    streams: int,
    batch_size: int,
    eos_id: int,
    unk_id: int,
    label: str,
    stop: StopRequest | None = None,
    ranks: Ranks | None = None,
) -> Score | None:
    """Score every token of a split once; None if `stop` was requested on the way.

    Several ranks share the pieces out and add their sums up.
    """
    ranks = ranks or Ranks()
    began = time.monotonic()
    device = model.embedding.weight.device
    was_training = model.training
    model.eval()
    cutoffs = model.output.cutoffs
    num_clusters = len(cutoffs) + 1 if cutoffs else 0
    cutoffs_J = torch.tensor(cutoffs, dtype=torch.int64, device=device)
    totals = torch.zeros(2 + num_clusters, dtype=torch.float64, device=device)
    state = model.initial_state(0)
    pieces = cut(len(tokens), streams)[ranks.rank :: ranks.size]
    batches = [pieces[i : i + batch_size] for i in range(0, len(pieces), batch_size)]
    num_steps = sum(max(end - warm for warm, _, end in batch) for batch in batches)
    with Progress(num_steps, label=label, unit="steps") as progress:
        for first, inputs_TB, targets_TB in _chunks(tokens, batches, eos_id=eos_id):
            if stop:
                break
            inputs, targets = (t.to(device, non_blocking=True) for t in (inputs_TB, targets_TB))
            state = model.initial_state(inputs.size(1)) if first else state
            hidden, state = model.read(inputs, state)
            nll = model.output.nll(hidden, targets).double()
            cluster = torch.bucketize(targets, cutoffs_J, right=True)
            chosen = [targets == unk_id, *(cluster == number for number in range(num_clusters))]
            totals += torch.stack([nll.sum(), *((nll * mask).sum() for mask in chosen)])
            progress.advance(len(inputs))
    model.train(was_training)
    if stop is not None and (signal := ranks.highest(stop.signal or 0)):
        stop.signal = signal  # perhaps another rank's
        return None
    ranks.sum(totals)
    nll_sum, unk_nll, *cluster_nlls = totals.tolist()
    unk_tokens = int(np.count_nonzero(tokens == unk_id))
    cluster_tokens = np.bincount(np.searchsorted(cutoffs, tokens, side="right"), minlength=num_clusters)
    clusters = tuple(zip(cluster_tokens.tolist()[:num_clusters], cluster_nlls, strict=True))
    seconds = max(time.monotonic() - began, 1e-9)
    return Score(len(tokens), nll_sum, unk_tokens, unk_nll, streams, seconds, clusters)


def _chunks(
    tokens: NDArray[Any], batches: list[list[tuple[int, int, int]]], *, eos_id: int
) -> Iterator[tuple[bool, Tensor, Tensor]]:
    """Inputs and targets of the batches, a few steps at a time, and whether a batch begins."""
    for batch in batches:
        inputs_TB, targets_TB = lay_out(tokens, batch, eos_id=eos_id)
        for first in range(0, len(inputs_TB), CHUNK):
            yield first == 0, inputs_TB[first : first + CHUNK], targets_TB[first : first + CHUNK]


def cut(num_tokens: int, streams: int) -> list[tuple[int, int, int]]:
    """The pieces as (where reading starts, where scoring starts, where both end); never an empty one."""
    streams = min(streams, num_tokens)
    bounds = [num_tokens * i // streams for i in range(streams + 1)]
    return [(max(0, start - WARM_UP), start, end) for start, end in pairwise(bounds)]


def lay_out(tokens: NDArray[Any], pieces: list[tuple[int, int, int]], *, eos_id: int) -> tuple[Tensor, Tensor]:
    """Pieces side by side as (T, B) inputs and targets; warm-up and padding are not scored."""
    length = max(end - warm for warm, _, end in pieces)
    inputs_TB = np.full((length, len(pieces)), eos_id, dtype=np.int64)
    targets_TB = np.full((length, len(pieces)), IGNORE_INDEX, dtype=np.int64)
    for b, (warm, start, end) in enumerate(pieces):
        # The input of a token is the one before it; nothing stands before the first, so its `</s>` stays.
        skip = 1 if warm == 0 else 0
        inputs_TB[skip : end - warm, b] = tokens[warm + skip - 1 : end - 1]
        targets_TB[start - warm : end - warm, b] = tokens[start:end]
    return torch.from_numpy(inputs_TB), torch.from_numpy(targets_TB)
