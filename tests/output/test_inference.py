"""Top-k, sampling and state dicts of layers."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.model.predictor import HiddenPredictions
from lm.output.base import inverse_cdf
from tests.helpers.distributions import chi_square, defined_distribution
from tests.helpers.layers import NAMES, make_layer, zipf_counts


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10, deadline=None)
@given(
    vocab_size=st.integers(4, 40), share=st.floats(0, 1, allow_subnormal=False), sharpness=st.sampled_from([0.1, 1, 10])
)
def test_topk_matches_sorted_distribution(name, vocab_size, share, sharpness):
    k = max(1, round(share * vocab_size))
    layer = make_layer(name, vocab_size=vocab_size, cutoffs=(1, 3))
    hidden = sharpness * torch.randn(5, 16, dtype=torch.float64)
    expected, order = layer.log_prob(hidden).sort(-1, descending=True)
    values, ids = layer.topk(hidden, k)
    torch.testing.assert_close(values, expected[:, :k], rtol=0, atol=1e-12)
    assert torch.equal(ids, order[:, :k])


@pytest.mark.parametrize("name", ["adaptive", "hsm_freq", "hsm_sim"])
def test_topk_skips_unlikely_clusters(name, monkeypatch):
    layer = make_layer(name, vocab_size=400, cutoffs=(20, 100))
    root = layer.root()[0]
    hidden = 40 * root[:1] / root[0].norm()  # nearly all probability on the root's first entry
    opened = []
    inside = layer.leaf_log_prob
    monkeypatch.setattr(layer, "leaf_log_prob", lambda h, cluster: (opened.append(cluster), inside(h, cluster))[1])
    layer.topk(hidden, 3)
    assert len(opened) <= 1


def sample(layer, hidden, uniform, **choice):
    return HiddenPredictions(hidden, layer).sample(uniform.double(), **choice)


CHOICES = [
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.6},
]


@pytest.mark.parametrize("exclude_id", [None, 2, 38])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_samples_pass_a_chi_square_test(name, choice, exclude_id):
    layer = make_layer(name)
    hidden, num_draws = torch.randn(16, dtype=torch.float64), 4000
    probs = defined_distribution(layer.log_prob(hidden[None])[0].detach(), exclude_id=exclude_id, **choice)
    uniform = torch.rand(num_draws, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    draws = sample(layer, hidden.expand(num_draws, 16), uniform, exclude_id=exclude_id, **choice)
    found = torch.bincount(draws, minlength=40).double()
    assert chi_square(found, probs, num_draws) > 1e-4


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_draws_are_independent_of_batch(name, choice):
    layer = make_layer(name)
    hidden, uniform = torch.randn(20, 16, dtype=torch.float64), torch.rand(20, dtype=torch.float64)
    together = sample(layer, hidden, uniform, exclude_id=3, **choice)
    alone = [sample(layer, h[None], u[None], exclude_id=3, **choice) for h, u in zip(hidden, uniform, strict=True)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("name", NAMES)
def test_excluded_word_is_never_drawn(name):
    layer = make_layer(name, dtype=torch.float32)
    with torch.no_grad():
        hidden = 400 * torch.randn(16)
    certain = int(layer.log_prob(hidden[None]).argmax())
    for choice in CHOICES:
        draws = sample(layer, hidden.expand(50, 16), torch.rand(50), exclude_id=certain, **choice)
        assert not (draws == certain).any()


def test_inverse_cdf_never_draws_zero_probability_entries():
    probs = torch.tensor([[0.0, 0.3, 0.0, 0.7 + 2**-52, 0.0]], dtype=torch.float64).expand(2, 5)
    entries, rest = inverse_cdf(probs, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert entries.tolist() == [1, 3]
    assert ((rest >= 0) & (rest <= 1)).all()


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_round_trip(name, tmp_path):
    trained, fresh = make_layer(name, seed=1), make_layer(name, seed=2)
    torch.save(trained.state_dict(), tmp_path / "layer.pt")
    fresh.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    hidden, targets = torch.randn(30, 16, dtype=torch.float64), torch.randint(40, (30,))
    assert torch.equal(fresh.log_prob(hidden), trained.log_prob(hidden))
    assert torch.equal(fresh.nll(hidden, targets), trained.nll(hidden, targets))
    assert torch.equal(fresh.topk(hidden, 5)[1], trained.topk(hidden, 5)[1])


@pytest.mark.parametrize("name", NAMES)
def test_describe_returns_plain_values_and_parameter_count(name):
    layer = make_layer(name)
    said = json.loads(json.dumps(layer.describe(zipf_counts(layer.vocab_size))))
    assert said["parameters"] == sum(p.numel() for p in layer.parameters())
    if "coverage" in said:
        assert sum(said["coverage"]) == pytest.approx(1)
