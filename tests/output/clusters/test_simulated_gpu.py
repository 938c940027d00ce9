"""Automatic clusters on simulated GPUs with noisy timings, compared with the best of a fine grid."""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch

from lm.output.clusters.choice import ClusterCosts, head_size, shares_of
from lm.output.clusters.cost_model import measure, time_grid
from lm.output.clusters.partition import projected_widths

TOKENS, COVERAGE = 2560, 0.75
GPUS = {
    # launch seconds, float32 FLOP/s, bfloat16 FLOP/s, bytes/s
    "K40": (4e-4, 2.5e12, 2.5e12, 2.0e11),
    "M40": (3e-4, 4.5e12, 4.5e12, 2.2e11),
    "A100": (2e-4, 1.5e13, 2.0e14, 1.3e12),
    "H100": (1.5e-4, 4.5e13, 5.0e14, 2.6e12),
}
CORPORA = {"text8": (44_372, 512), "Europarl fi": (350_000, 512), "One Billion Word": (793_470, 2048)}
"""(vocabulary size, hidden width)."""


def zipf(num_words):
    return 1e9 / (np.arange(num_words) + 3.0) ** 1.05


@dataclass
class SimulatedTimer:
    """Simulated GPU block: the larger of launch time and compute plus memory traffic."""

    width: int
    full_width: int
    gpu: str
    precision: str
    noise: float = 0.0
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cuda"))

    def __post_init__(self):
        self.random = np.random.default_rng([self.seed, self.width])

    def true_seconds(self, words, tokens):
        floor, fp32, bf16, bandwidth = GPUS[self.gpu]
        products = 6.0 * self.width * words * tokens
        if self.width != self.full_width:
            products = products + 6.0 * self.width * self.full_width * tokens
        # Matmuls read and write word vectors and gradients; the update does so again, with the accumulator.
        traffic = 4.0 * (9 * self.width * words + 6 * words * tokens)
        return np.maximum(floor, products / (fp32 if self.precision == "fp32" else bf16) + traffic / bandwidth)

    def seconds(self, words, tokens):
        return float(self.true_seconds(words, tokens)) * float(np.exp(self.noise * self.random.normal()))


def timers_of(width, **more):
    return [SimulatedTimer(w, width, **more) for w in [width, *projected_widths(width, num_tails=3)]]


def true_time(cutoffs, shares, timers):
    edges = [0, *cutoffs, len(shares)]
    total = timers[0].true_seconds(edges[1] + len(cutoffs), TOKENS)
    for number, (a, b) in enumerate(pairwise(edges[1:]), start=1):
        total += timers[number].true_seconds(b - a, TOKENS * shares[a:b].sum())
    return float(total)


def best_time(shares, timers, *, points=90):
    """Return the lowest true time over all cutoffs on a logarithmic grid, with one to three tails."""
    least = head_size(shares, coverage=COVERAGE)
    at = np.unique(np.geomspace(least, len(shares) - 1, points).astype(int))
    ends = np.append(at, len(shares))
    seen = np.concatenate([[0.0], np.cumsum(shares)]) * TOKENS
    sizes, tokens = ends[None, :] - ends[:, None], seen[ends][None, :] - seen[ends][:, None]
    tail = [np.where(sizes > 0, t.true_seconds(np.maximum(sizes, 1), np.abs(tokens)), np.inf) for t in timers[1:]]
    best = np.inf
    for number in (1, 2, 3):
        cost = timers[0].true_seconds(ends + number, TOKENS)
        for i in range(number):
            cost = (cost[:, None] + tail[i]).min(0)
        best = min(best, cost[-1])
    return float(best)


def slowdown(corpus, gpu, precision, *, seed, noise=0.05):
    """Return the true time of the automatic choice relative to the optimum."""
    num_words, width = CORPORA[corpus]
    counts = zipf(num_words)
    timers = timers_of(width, gpu=gpu, precision=precision, noise=noise, seed=seed)
    model = measure(timers, tokens=TOKENS, source="simulated")
    choice = ClusterCosts(counts, width, TOKENS, model, COVERAGE).choose()
    shares = shares_of(counts)
    return true_time(choice.cutoffs, shares, timers) / best_time(shares, timers)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("gpu", GPUS)
def test_choice_is_within_ten_percent_of_optimum(gpu, precision):
    assert max(slowdown("text8", gpu, precision, seed=seed) for seed in range(2)) < 1.1


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("corpus", CORPORA)
def test_choice_is_within_ten_percent_over_many_seeds(corpus, gpu, precision):
    """Reproduces the table in docs/clusters.md; each test prints a row with pytest -s."""
    ratios = [slowdown(corpus, gpu, precision, seed=seed) for seed in range(50)]
    print(f"| {corpus} | {gpu} | {precision} | {np.median(ratios):.3f} | {max(ratios):.3f} |")
    assert max(ratios) < 1.1


def test_blocks_grow_past_launch_overhead():
    timer = SimulatedTimer(512, 512, "H100", "fp32")
    points = time_grid(timer, tokens=TOKENS, head=True)
    assert max(points.values()) > 8 * min(points.values())
    assert {tokens for _, tokens in points} == {TOKENS // 8, TOKENS}


def test_out_of_memory_stops_block_growth():
    def seconds(words, _):
        if words > 5000:
            raise torch.OutOfMemoryError
        return 1e-4

    timer = SimulatedTimer(32, 512, "H100", "fp32")
    timer.seconds = seconds
    assert max(words for words, _ in time_grid(timer, tokens=TOKENS, head=False)) == 3840


def test_launch_bound_blocks_get_floor_and_slope():
    timers = timers_of(512, gpu="H100", precision="fp32", noise=0.05)
    for timer in timers:
        timer.true_seconds = lambda *_: 1e-3
    for block in measure(timers, tokens=TOKENS, source="simulated").blocks:
        assert block.seconds(60, 25) == pytest.approx(1e-3, rel=0.15)
        assert block.per_pair > 0
