"""Invalid sizes and cutoffs raise; degenerate vocabularies train."""

import numpy as np
import pytest
import torch

from lm.config.registry import plugin_names
from lm.output.base import build_output
from lm.output.layers.adaptive import AdaptiveSoftmax
from lm.output.layers.hsm import HierarchicalSoftmax
from lm.system.errors import UserError
from tests.helpers.layers import config_of, make_layer, zipf_counts

CLUSTERED = ["dsoftmax", "dsoftmax_star", "adaptive"]


@pytest.mark.parametrize("cutoffs", [[30, 10], [10, 10], [10, 40], [10, 50], [0, 10], [-3]], ids=str)
@pytest.mark.parametrize("name", CLUSTERED)
def test_cutoffs_outside_vocabulary_raise(name, cutoffs):
    with pytest.raises(UserError) as caught:
        build_output(config_of(name, cutoffs=cutoffs), width=64, counts=zipf_counts(40))
    assert "output.cutoffs must increase" in str(caught.value)
    assert "(40)" in str(caught.value) and str(cutoffs) in str(caught.value)


@pytest.mark.parametrize(
    ("cutoffs", "sound"),
    [
        *(([10, 30], True), ([5], True), ([], True), ([30, 10], False), ([10, 10], False), ([0], False)),
        *(("many", False), (7, False), ([1.5], False), ([True], False), (None, False)),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", CLUSTERED)
def test_malformed_cutoffs_are_config_errors(name, cutoffs, sound):
    problems = list(config_of(name, cutoffs=cutoffs).problems())
    assert bool(problems) is not sound
    assert all("output.cutoffs must be" in p and repr(cutoffs) in p for p in problems)


def test_width_too_small_for_clusters_raises():
    with pytest.raises(UserError, match="hidden width of 15 can be split into slices for at most 1 tail; got 2"):
        make_layer("dsoftmax", width=15)


@pytest.mark.parametrize("num_classes", [0, 41])
def test_more_classes_than_words_raises(num_classes):
    with pytest.raises(UserError, match=rf"output.num_classes must be from 1 .* \(40\); got {num_classes}"):
        HierarchicalSoftmax(width=8, vocab_size=40, num_classes=num_classes)


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
