"""Every layer's loss, gradients and likelihoods match a reference, for random sizes, cutoffs and targets."""

import heapq
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.output.layers.hsm_huffman import huffman_tree
from tests.helpers.definitions import log_distribution, training_loss
from tests.helpers.layers import NAMES, gradients, make_layer

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@st.composite
def cases(draw):
    """Draw layer sizes and targets, favoring edge cases: one-word clusters, ignored tokens, N = 1."""
    vocab_size = draw(st.integers(4, 30))
    cutoffs = tuple(sorted(draw(st.sets(st.integers(1, vocab_size - 1), max_size=2))))
    low = draw(st.integers(0, vocab_size - 1))
    high = draw(st.integers(low, vocab_size - 1))
    words = st.integers(low, high)
    target = draw(st.sampled_from([words, words | st.just(-100), st.just(-100)]))
    targets = draw(st.lists(target, min_size=1, max_size=8))
    return vocab_size, cutoffs, torch.tensor(targets), draw(st.sampled_from([16, 19]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None)
@given(case=cases())
def test_loss_and_gradients_match_reference(name, dtype, case):
    vocab_size, cutoffs, targets, width = case
    layer = make_layer(name, width=width, vocab_size=vocab_size, cutoffs=cutoffs, dtype=dtype)
    hidden = torch.randn(len(targets), width, dtype=dtype, requires_grad=True)
    plan = layer.plan(targets)
    loss = layer.loss(hidden, targets, plan)
    (3 * loss).backward()
    found = gradients(layer) | {"hidden": hidden.grad}

    parameters = dict(layer.named_parameters())
    for p in parameters.values():
        p.requires_grad_()
    expected = training_loss(layer, hidden, targets, plan)
    wanted = torch.autograd.grad(
        3 * expected, [*parameters.values(), hidden], allow_unused=True, materialize_grads=True
    )
    torch.testing.assert_close(loss, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for key, gradient in zip([*parameters, "hidden"], wanted, strict=True):
        torch.testing.assert_close(found[key], gradient, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], msg=key)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None)
@given(case=cases())
def test_nll_and_log_prob_match_reference(name, case):
    vocab_size, cutoffs, targets, width = case
    layer = make_layer(name, width=width, vocab_size=vocab_size, cutoffs=cutoffs)
    hidden = torch.randn(len(targets), width, dtype=torch.float64)
    expected = torch.stack([log_distribution(layer, h) for h in hidden])
    log_prob = layer.log_prob(hidden)
    torch.testing.assert_close(log_prob, expected, rtol=0, atol=1e-10)
    assert log_prob.logsumexp(-1).abs().max() < 1e-10
    nll = layer.nll(hidden, targets)
    scored = targets != -100
    picked = -expected.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    torch.testing.assert_close(nll, torch.where(scored, picked, 0), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_leading_shape_does_not_change_results(name):
    layer = make_layer(name)
    hidden, targets = torch.randn(2, 3, 4, 16, dtype=torch.float64), torch.randint(40, (2, 3, 4))
    plan = layer.plan(targets)
    flat = layer.loss(hidden.view(24, 16), targets.view(24), plan)
    torch.testing.assert_close(layer.eval().loss(hidden, targets, plan), flat)
    assert layer.nll(hidden, targets).shape == targets.shape
    assert layer.log_prob(hidden).shape == (2, 3, 4, 40)
    assert layer.topk(hidden, 3)[1].shape == (2, 3, 4, 3)


@pytest.mark.parametrize("name", NAMES)
def test_single_state_matches_batch_of_one(name):
    layer = make_layer(name).eval()
    hidden, seed = torch.randn(16, dtype=torch.float64), torch.Generator().manual_seed
    for word in (0, 39, -100):
        target = torch.tensor(word)
        alone = layer.loss(hidden, target, layer.plan(target, generator=seed(1)))
        batch = layer.loss(hidden[None], target[None], layer.plan(target[None], generator=seed(1)))
        torch.testing.assert_close(alone, batch)
        torch.testing.assert_close(layer.nll(hidden, target), layer.nll(hidden[None], target[None])[0])
    torch.testing.assert_close(layer.log_prob(hidden), layer.log_prob(hidden[None])[0])
    assert torch.equal(layer.topk(hidden, 3)[1], layer.topk(hidden[None], 3)[1][0])


@pytest.mark.parametrize("name", NAMES)
def test_extreme_scores_stay_finite_and_exact(name):
    layer = make_layer(name, dtype=torch.float32)
    targets = torch.arange(40)
    hidden = 300 * torch.randn(40, 16)
    wide = make_layer(name)
    wide.load_state_dict(layer.state_dict())
    expected = wide.nll(hidden.double(), targets)
    assert expected.max() > 200  # far beyond where exp underflows
    torch.testing.assert_close(layer.nll(hidden, targets).double(), expected, rtol=1e-4, atol=1e-3)
    hidden.requires_grad_()
    loss = layer.loss(hidden, targets)
    loss.backward()
    assert loss.isfinite() and hidden.grad.isfinite().all()


# ---- Huffman trees ---------------------------------------------------------------------------------------------------


def least_total_length(counts):
    """Return the optimal total code length: every merge adds one step to all words below it."""
    heap, total = list(counts), 0
    heapq.heapify(heap)
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        total += merged
        heapq.heappush(heap, merged)
    return total


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.integers(1, 1000), min_size=1, max_size=60))
def test_tree_is_an_optimal_prefix_code(counts):
    counts = sorted(counts, reverse=True)
    tree = huffman_tree(np.array(counts))
    start = tree.start_V.tolist()
    paths = [list(zip(tree.node_M[a:b].tolist(), tree.turn_M[a:b].tolist(), strict=True)) for a, b in pairwise(start)]
    assert sum(count * len(path) for count, path in zip(counts, paths, strict=True)) == least_total_length(counts)
    codes = ["".join("+" if turn > 0 else "-" for _, turn in path) for path in paths]
    assert all(a == b or not b.startswith(a) for a in codes for b in codes)
    # Each node corresponds to exactly one sequence of turns.
    leads_to = {(code[:i], path[i][0]) for code, path in zip(codes, paths, strict=True) for i in range(len(path))}
    assert len(leads_to) == len({lead for lead, _ in leads_to}) == len({node for _, node in leads_to})
    assert {node for _, node in leads_to} == set(range(len(counts) - 1))
    # Nodes are numbered by decreasing count, so frequently used rows are close together.
    below = [
        sum(c for c, path in zip(counts, paths, strict=True) if node in dict(path)) for node in range(len(counts) - 1)
    ]
    assert below == sorted(below, reverse=True)
