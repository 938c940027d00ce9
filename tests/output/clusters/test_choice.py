"""Cluster search versus brute force over all cutoffs, and choices for unusual vocabularies."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.config.groups import find_plugin
from lm.output.base import LayerSizes
from lm.output.clusters import choice
from lm.output.clusters.choice import Cluster, ClusterChoice, ClusterCosts, head_size
from lm.output.clusters.cost_model import BlockCost, CostModel, flops_model
from lm.output.clusters.partition import projected_widths
from lm.system.errors import UserError

TOKENS = 100

costs = st.tuples(
    st.sampled_from([0.0, 0.5, 3.0]),  # floor
    st.sampled_from([0.0, 0.1, 1.0]),  # constant
    st.sampled_from([0.0, 0.001, 0.01, 0.1]),  # per pair
    st.sampled_from([0.0, 0.01, 0.3]),  # per word
    st.sampled_from([0.0, 0.02]),  # per token
)
distributions = st.one_of(
    st.lists(st.integers(0, 1000), min_size=5, max_size=12),  # arbitrary, including zeros
    st.integers(5, 12).map(lambda n: [7] * n),  # all equal
    st.integers(5, 12).map(lambda n: [1000] + [0] * (n - 1)),  # one word only
    st.integers(5, 12).map(lambda n: [1000 // (i + 1) for i in range(n)]),  # Zipf
).filter(lambda counts: sum(counts) > 0)


def seconds(cost: tuple[float, ...], words: int, tokens: float) -> float:
    floor, constant, per_pair, per_word, per_token = cost
    return max(floor, constant + per_pair * words * tokens + per_word * words + per_token * tokens)


def brute_force(counts: list[int], head, tails, least_head: int) -> float:
    """Return the lowest time over all cutoffs, summed from the cost definition."""
    shares = np.array(counts) / sum(counts)
    best = np.inf
    for cut in combinations(range(least_head, len(counts)), len(tails)):
        edges = [*cut, len(counts)]
        total = seconds(head, cut[0] + len(tails), TOKENS)
        for tail, a, b in zip(tails, edges, edges[1:], strict=False):
            total += seconds(tail, b - a, TOKENS * shares[a:b].sum())
        best = min(best, total)
    return float(best)


@given(
    counts=distributions.map(lambda counts: sorted(counts, reverse=True)),
    coverage=st.sampled_from([0.0, 0.3, 0.75, 0.99]),
    blocks=st.one_of(st.lists(costs, min_size=4, max_size=4), costs.map(lambda cost: [cost])),
    num_tails=st.integers(1, 3),
)
@settings(max_examples=300, deadline=None)
def test_choice_is_the_fastest(counts, coverage, blocks, num_tails) -> None:
    """Against brute force. The paper's objective has no minimum head and one block for all clusters."""
    model = CostModel("test", tuple(BlockCost(*block) for block in blocks))
    shares = np.array(counts) / sum(counts)
    least = next(n for n in range(1, len(counts) + 1) if shares[:n].sum() >= coverage - 1e-9)
    found = ClusterCosts(np.array(counts), 64, TOKENS, model, coverage)
    if num_tails > len(counts) - least:
        with pytest.raises(UserError, match=r"output\.num_tails must leave a word for each tail"):
            found.choose(num_tails)
        return
    choice = found.choose(num_tails)
    tails = blocks[1 : num_tails + 1] if len(blocks) > 1 else blocks * num_tails
    assert choice.seconds == pytest.approx(brute_force(counts, blocks[0], tails, least), rel=1e-9)
    assert sum(cluster.words for cluster in choice.clusters) == len(counts)
    assert sum(cluster.share for cluster in choice.clusters) == pytest.approx(1)
    assert choice.clusters[0].share >= coverage - 1e-9


ZIPF = np.maximum(1, 1_000_000 // np.arange(1, 20_001))


def choose_clusters(counts, *, width: int = 512, coverage: float = 0.75, num_tails: int | None = None):
    widths = [width, *projected_widths(width, num_tails=3)]
    return ClusterCosts(np.asarray(counts), width, 2560, flops_model(widths), coverage).choose(num_tails)


def test_fewest_tails_within_two_percent_are_chosen() -> None:
    choice = choose_clusters(ZIPF)
    times = {n: choose_clusters(ZIPF, num_tails=n).seconds for n in (1, 2, 3)}
    chosen = len(choice.cutoffs)
    assert choice.seconds <= 1.02 * min(times.values())
    assert all(times[n] > 1.02 * min(times.values()) for n in range(1, chosen))
    assert choice.full_seconds > 2 * choice.seconds


@pytest.mark.parametrize("width", [5, 16, 48, 64, 512, 2048])
@pytest.mark.parametrize("name", ["adaptive", "dsoftmax_star"])
def test_layer_is_as_wide_as_predicted(name: str, width: int, tmp_path: Path) -> None:
    """Tail i is 1/4^i of the hidden width, but not below output.min_width, unless the hidden width is."""
    plugin = find_plugin("output", name)
    config = plugin.settings(name, cost_model="flops", num_tails=3, min_width=12)
    size = {"width": width, "tokens": 2560, "device": torch.device("cpu"), "precision": "fp32"}
    chosen = choice.choose_clusters(config, counts=ZIPF, cache_dir=tmp_path, **size)
    layer = plugin.target.build(replace(config, cutoffs=chosen.cutoffs), LayerSizes(width, ZIPF))
    expected = [max(width // 4**i, min(12, width)) for i in range(4)]
    assert [cluster.width for cluster in chosen.clusters] == expected
    assert layer.describe()["widths"] == expected


@pytest.mark.parametrize(
    "counts",
    [[1], [5, 3], [9] * 10, [10, 5, 3, 2, 2, 1, 1, 1, 1, 1], [10**9] + [1] * 50, [0] * 10, [100] * 1000],
    ids=["one", "two", "ten equal", "ten", "dominant", "no counts", "thousand equal"],
)
def test_unusual_vocabularies_get_sensible_clusters(counts) -> None:
    choice = choose_clusters(counts)
    sizes = [cluster.words for cluster in choice.clusters]
    assert sum(sizes) == len(counts)
    assert min(sizes) >= 1
    assert len(choice.cutoffs) <= 3


def test_head_size_is_smallest_with_required_coverage() -> None:
    shares = np.array([0.5, 0.25, 0.15, 0.1])
    assert [head_size(shares, coverage=c) for c in (0.1, 0.5, 0.51, 0.75, 0.9, 0.99)] == [1, 1, 2, 2, 3, 4]
    assert head_size(np.full(10, 0.1), coverage=0.7) == 7


def test_predicts_times_for_given_cutoffs() -> None:
    choice = ClusterCosts(ZIPF, 512, 2560, flops_model([512, 128, 32])).predict([2000, 10_000])
    assert [cluster.words for cluster in choice.clusters] == [2000, 8000, 10_000]
    assert [cluster.width for cluster in choice.clusters] == [512, 128, 32]
    assert choice.clusters[0].share == pytest.approx(ZIPF[:2000].sum() / ZIPF.sum())
    assert choice.clusters[0].seconds == pytest.approx(2002 * 2560 * 512 * 6e-9)
    tokens = 2560 * ZIPF[2000:10_000].sum() / ZIPF.sum()
    assert choice.clusters[1].seconds == pytest.approx(6e-9 * 128 * tokens * (8000 + 512))
    assert "cutoffs [2000, 10000]" in choice.summary()
    assert [row[0] for row in choice.rows()] == ["head", "tail 1", "tail 2"]


def test_dsoftmax_is_predicted_slower_than_adaptive(tmp_path: Path) -> None:
    """Every cluster is computed for every token; operations are counted from the definition."""
    counts = np.array([100_000 // (i + 1) for i in range(5000)])
    found = {
        name: choice.choose_clusters(
            find_plugin("output", name).settings(cost_model="flops", num_tails=2, head_coverage=0.75),
            counts=counts,
            width=64,
            tokens=TOKENS,
            device=torch.device("cpu"),
            precision="fp32",
            cache_dir=tmp_path,
        )
        for name in ("adaptive", "dsoftmax", "dsoftmax_star")
    }
    cuts = found["adaptive"].cutoffs
    assert found["dsoftmax_star"].cutoffs == found["dsoftmax"].cutoffs == cuts
    per_pair = found["adaptive"].full_seconds / (5000 * TOKENS)
    least = per_pair * TOKENS * (cuts[0] + (cuts[1] - cuts[0]) / 4 + (5000 - cuts[1]) / 8)
    for name in ("dsoftmax", "dsoftmax_star"):
        assert found[name].seconds > 0.99 * least
        assert found[name].seconds > 2 * found["adaptive"].seconds


def test_clusters_predicted_to_take_no_time_are_described() -> None:
    assert ClusterChoice([1], [Cluster(1, 0.5, 8, 0.0), Cluster(1, 0.5, 8, 0.0)], 0.0, "measured", 0.1).summary()
