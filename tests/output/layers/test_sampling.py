"""Sampling layers: sample frequencies and convergence of training."""

import numpy as np
import pytest
import torch

from lm.output.base import build_output
from lm.output.layers.full import FullConfig
from lm.output.layers.sampling import BlackOutConfig, NCEConfig, SamplingConfig, sampling_distribution
from tests.helpers.distributions import chi_square
from tests.helpers.layers import make_layer

COUNTS = np.array([900, 400, 100, 40, 40, 7, 2, 1, 0])


def defined(sampler, power):
    seen = [max(count, 1) for count in COUNTS.tolist()]
    weights = {
        "unigram": seen,
        "power": [count**power for count in seen],
        "log_uniform": [np.log((rank + 2) / (rank + 1)) for rank in range(len(seen))],
    }[sampler]
    return np.array(weights) / sum(weights)


@pytest.mark.parametrize(("sampler", "power"), [("unigram", 0.3), ("power", 0.4), ("power", 0), ("log_uniform", 0.3)])
def test_draws_match_sampler_distribution(sampler, power):
    expected = defined(sampler, power)
    np.testing.assert_allclose(sampling_distribution(COUNTS, sampler=sampler, power=power), expected, rtol=1e-12)
    config = SamplingConfig("sampled", 1.0, sampler, power)
    layer = build_output(config, width=8, counts=COUNTS)
    generator = torch.Generator().manual_seed(3)
    drawn, included, steps = np.zeros(len(COUNTS)), np.zeros(len(COUNTS)), 800
    for _ in range(steps):
        plan = layer.plan(torch.empty(0, dtype=torch.long), generator=generator)
        words = plan.rows_U.numpy()
        drawn[words] += plan.times_U.numpy()
        included[words] += 1
    assert drawn.sum() == steps * layer.num_samples
    assert chi_square(torch.from_numpy(drawn), torch.from_numpy(expected), int(drawn.sum())) > 1e-4
    inclusion = np.exp(-layer.correction_V.numpy())
    np.testing.assert_allclose(inclusion, 1 - (1 - expected) ** layer.num_samples, rtol=1e-9)
    assert (np.abs(included / steps - inclusion) < 5 * np.sqrt(inclusion * (1 - inclusion) / steps) + 1e-9).all()


def final_perplexity(config, source_CV, *, steps=300):
    """Train a layer on words from a known distribution in each of C contexts; return its true perplexity."""
    torch.manual_seed(1)
    num_contexts = len(source_CV)
    counts = np.ceil(1e4 * source_CV.mean(0).numpy()).astype(int)
    order = np.argsort(-counts, kind="stable")
    source_CV = source_CV[:, order]
    layer = build_output(config, width=8, counts=counts[order])
    context_CD = torch.randn(num_contexts, 8)
    context_CD.requires_grad_()
    if hasattr(layer, "table"):
        layer.table.sparse = False
        layer.table.weight.requires_grad_()
    optimizer = torch.optim.Adam([*layer.parameters(), context_CD], lr=0.05)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.01, steps)
    for _ in range(steps):
        context_N = torch.randint(num_contexts, (512,))
        word_N = source_CV[context_N].multinomial(1).squeeze(1)
        loss = layer.loss(context_CD[context_N], word_N, layer.plan(word_N))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    log_prob_CV = layer.log_prob(context_CD).detach()
    return float((-(source_CV * log_prob_CV).sum(1).mean()).exp())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [NCEConfig, BlackOutConfig], ids=["nce", "blackout"])
def test_training_approaches_full_softmax_with_more_samples(kind):
    generator = torch.Generator().manual_seed(5)
    source_CV = (2 * torch.randn(4, 100, generator=generator)).softmax(1)
    full = final_perplexity(FullConfig("full"), source_CV)
    few, many = (
        final_perplexity(kind(kind.__name__[:-6].lower(), sample_fraction=fraction), source_CV)
        for fraction in (0.04, 1.0)
    )
    assert many < 1.03 * full
    assert few > many


def test_only_sampled_and_target_rows_get_gradients():
    layer = build_output(NCEConfig("nce", sample_fraction=0.2), width=8, counts=COUNTS)
    plan = layer.plan(torch.tensor([8, 8]), generator=torch.Generator().manual_seed(1))
    layer.loss(torch.randn(2, 8), torch.tensor([8, 8]), plan).backward()
    used = layer.table.take_used()
    assert set(used.rows_U.tolist()) == {8, *plan.rows_U[plan.times_U > 0].tolist()}
    assert used.values.grad.shape == (len(used.rows_U), 8) and layer.table.weight.grad is None


def test_sampled_plan_depends_only_on_generator():
    layer = make_layer("sampled", vocab_size=200)
    targets = torch.randint(200, (30,))
    plans = [layer.plan(targets, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert torch.equal(plans[0].rows_U, plans[1].rows_U)
    assert not torch.equal(plans[0].rows_U, plans[2].rows_U)
    words = plans[0].rows_U
    assert len(words.unique()) == len(words)
    assert torch.equal(words[plans[0].column_N], targets)


def test_sampled_loss_approaches_full_loss():
    layer = make_layer("sampled", vocab_size=30).eval()
    hidden, targets = torch.randn(50, 16, dtype=torch.float64), torch.randint(30, (50,))
    exact = layer.nll(hidden, targets).mean()
    errors = []
    for samples in (1, 10, 1000):
        layer = make_layer("sampled", vocab_size=30, samples=samples).eval()
        draws = [layer.loss(hidden, targets, layer.plan(targets)) for _ in range(20)]
        errors.append(float((torch.stack(draws) - exact).abs().mean()))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-9


@pytest.mark.parametrize("name", ["sampled", "nce", "blackout", "hsm_huffman"])
@pytest.mark.parametrize("ignored", [[], [0], [4], [0, 4]], ids=str)
def test_plans_of_groups_add_up_to_the_plan_of_the_batch(name, ignored):
    """Also if only one group has ignored targets."""
    layer = make_layer(name).eval()
    hidden_TBD, targets_TB = torch.randn(3, 6, 16, dtype=torch.float64), torch.randint(40, (3, 6))
    targets_TB[1, ignored] = -100
    groups, seed = [slice(0, 3), slice(3, 6)], torch.Generator().manual_seed
    plans = layer.plans(targets_TB, groups, generator=seed(1))
    sums = [
        plan.num_scored * layer.loss(hidden_TBD[:, group], targets_TB[:, group], plan)
        for group, plan in zip(groups, plans, strict=True)
    ]
    whole = layer.plan(targets_TB, generator=seed(1))
    torch.testing.assert_close(sum(sums), whole.num_scored * layer.loss(hidden_TBD, targets_TB, whole))
