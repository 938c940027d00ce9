"""Invalid sizes and cutoffs raise; degenerate vocabularies train."""

import numpy as np
import pytest
import torch

from lm.config.groups import plugin_names
from lm.output.base import build_output
from lm.output.layers.adaptive import AdaptiveSoftmax
from lm.output.layers.hsm import FrequencySoftmax, HierarchicalSoftmax
from lm.system.errors import UserError
from tests.helpers.layers import NAMES, config_of, gradients, make_layer, zipf_counts

CLUSTERED = ["dsoftmax", "dsoftmax_star", "adaptive"]


@pytest.mark.parametrize("cutoffs", [[30, 10], [10, 10], [10, 40], [10, 50], [0, 10], [-3]], ids=str)
@pytest.mark.parametrize("name", CLUSTERED)
def test_cutoffs_outside_vocabulary_raise(name, cutoffs):
    with pytest.raises(UserError) as caught:
        build_output(config_of(name, cutoffs=cutoffs), width=64, counts=zipf_counts(40))
    assert "output.cutoffs must increase" in str(caught.value)
    assert "(40)" in str(caught.value) and str(cutoffs) in str(caught.value)


def test_width_too_small_for_clusters_raises():
    with pytest.raises(UserError, match="hidden width of 15 can be split into slices for at most 1 tail; got 2"):
        make_layer("dsoftmax", width=15)


@pytest.mark.parametrize("num_classes", [0, 41])
def test_more_classes_than_words_raises(num_classes):
    with pytest.raises(UserError, match=rf"output.num_classes must be from 1 .* \(40\); got {num_classes}"):
        FrequencySoftmax.from_counts(zipf_counts(40), width=8, num_classes=num_classes)


def test_empty_class_raises():
    with pytest.raises(UserError, match="no class may be empty; got 4 words in 2 of 3 classes"):
        HierarchicalSoftmax(width=8, vocab_size=4, num_classes=3, classes=np.array([0, 0, 2, 2]))


@pytest.mark.parametrize("name", plugin_names("output"))
def test_single_word_has_probability_one(name):
    layer = build_output(config_of(name, cutoffs=[]), width=16, counts=np.array([5]))
    hidden = torch.randn(3, 16)
    assert not layer.nll(hidden, torch.zeros(3, dtype=torch.long)).any()
    assert layer.self_normalized or layer.loss(hidden, torch.zeros(3, dtype=torch.long)) == 0
    assert torch.equal(layer.log_prob(hidden), torch.zeros(3, 1))


@pytest.mark.parametrize("counts", [np.zeros(20), np.array([10**9, *[0] * 19])], ids=["unseen", "one word"])
@pytest.mark.parametrize("name", plugin_names("output"))
def test_degenerate_counts_train(name, counts):
    layer = build_output(config_of(name, cutoffs=[3]), width=16, counts=counts)
    hidden = torch.randn(20, 16, requires_grad=True)
    layer.loss(hidden, torch.arange(20)).backward()
    assert hidden.grad.isfinite().all() and layer.log_prob(hidden).logsumexp(-1).abs().max() < 1e-5


def test_tails_have_at_least_sixteen_columns():
    assert AdaptiveSoftmax(width=512, vocab_size=100, cutoffs=[10, 20, 40, 70]).widths == [128, 32, 16, 16]
    assert AdaptiveSoftmax(width=7, vocab_size=100, cutoffs=[10, 20]).widths == [7, 7]
    assert make_layer("dsoftmax", width=512).widths == [352, 128, 32]


# ---- training steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_layers_build_on_meta_device(name):
    with torch.device("meta"):
        laid_out = make_layer(name)
    shapes = {key: t.shape for key, t in make_layer(name).state_dict().items()}
    assert {key: t.shape for key, t in laid_out.state_dict().items()} == shapes


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_autocast_is_within_one_percent(name):
    layer = make_layer(name, width=64, vocab_size=300, cutoffs=(50, 150), dtype=torch.float32)
    hidden, targets = torch.randn(64, 64), torch.randint(300, (64,))
    plan = layer.plan(targets)
    with torch.no_grad():
        exact = layer.loss(hidden, targets, plan)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = hidden.bfloat16().requires_grad_()
        loss = layer.loss(narrow, targets, plan)
        nll = layer.nll(hidden, targets)
    loss.backward()
    assert abs(loss - exact) < 0.01 * exact
    assert abs(nll.mean() - layer.nll(hidden, targets).mean()) < 0.01 * nll.mean()
    assert narrow.grad.dtype == torch.bfloat16 and narrow.grad.isfinite().all()
    assert all(g.dtype == torch.float32 for g in gradients(layer).values())


@pytest.mark.parametrize("name", NAMES)
def test_ignored_tokens_do_not_affect_results(name):
    layer = make_layer(name).eval()
    hidden, targets = torch.randn(9, 16, dtype=torch.float64), torch.randint(40, (9,))
    seed = torch.Generator().manual_seed
    alone = layer.loss(hidden, targets, layer.plan(targets, generator=seed(3)))
    padded_hidden = torch.cat([hidden, torch.full((4, 16), torch.nan, dtype=torch.float64)])
    padded = torch.cat([targets, torch.full((4,), -100)])
    loss = layer.loss(padded_hidden, padded, layer.plan(padded, generator=seed(3)))
    torch.testing.assert_close(loss, alone, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", [-1, 40, 10**6])
def test_targets_outside_vocabulary_raise(name, wrong):
    layer = make_layer(name)
    with pytest.raises(UserError, match=rf"vocabulary size \(40\).*got {wrong}\."):
        layer.plan(torch.tensor([0, wrong]))


@pytest.mark.parametrize("name", NAMES)
def test_initialization_is_seeded_and_scaled_by_fan_in(name):
    def fresh(seed):
        torch.manual_seed(seed)
        return build_output(config_of(name, cutoffs=[10, 25]), width=16, counts=zipf_counts(40))

    first, same, other = fresh(1), fresh(1), fresh(2)
    for (key, a), b, c in zip(first.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), key
        if a.dim() == 2:
            assert not torch.equal(a, c), key
            bound = a.shape[1] ** -0.5
            assert a.abs().max() <= bound and a.abs().max() > 0.8 * bound, key
