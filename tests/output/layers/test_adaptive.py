"""Adaptive softmax: conversion from and to torch's module."""

import numpy as np
import pytest
import torch
from torch import nn

from lm.output.base import build_output
from lm.output.layers.adaptive import AdaptiveConfig, AdaptiveSoftmax
from lm.system.errors import UserError
from tests.helpers.layers import make_layer


def torch_module(*, head_bias=False, div_value=4.0, width=64, dtype=torch.float64):
    torch.manual_seed(0)
    return nn.AdaptiveLogSoftmaxWithLoss(width, 60, [10, 30], div_value=div_value, head_bias=head_bias).to(dtype)


@pytest.mark.parametrize("head_bias", [False, True])
@pytest.mark.parametrize("div_value", [2.0, 4.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_loss_gradients_and_probabilities_match_torch(head_bias, div_value, dtype, tolerance):
    module = torch_module(head_bias=head_bias, div_value=div_value, dtype=dtype)
    if head_bias:
        nn.init.normal_(module.head.bias)
    layer = AdaptiveSoftmax.from_torch(module)
    hidden, targets = torch.randn(50, 64, dtype=dtype, requires_grad=True), torch.randint(60, (50,))
    ours, theirs = layer.loss(hidden, targets), module(hidden, targets).loss
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(layer.log_prob(hidden), module.log_prob(hidden), rtol=tolerance, atol=tolerance)
    (ours_hidden,) = torch.autograd.grad(ours, hidden, retain_graph=True)
    (theirs_hidden,) = torch.autograd.grad(theirs, hidden, retain_graph=True)
    torch.testing.assert_close(ours_hidden, theirs_hidden, rtol=tolerance, atol=tolerance)
    ours.backward()
    theirs.backward()
    pairs = [(layer.head, module.head.weight)]
    pairs += [(layer.head_bias, module.head.bias)] if head_bias else []
    for i, tail in enumerate(module.tail):
        pairs += [(layer.projections[i], tail[0].weight), (layer.clusters[i], tail[1].weight)]
    assert len(pairs) == len(list(layer.parameters()))
    for mine, other in pairs:
        torch.testing.assert_close(mine.grad, other.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("head_bias", [False, True])
@pytest.mark.parametrize(("width", "div_value"), [(128, 4), (128, 2.0), (66, 4), (64, 1)])
def test_torch_round_trip_is_exact(head_bias, width, div_value):
    module = torch_module(head_bias=head_bias, width=width, div_value=div_value)
    back = AdaptiveSoftmax.from_torch(module).to_torch()
    assert back.state_dict().keys() == module.state_dict().keys()
    assert all(torch.equal(back.state_dict()[key], value) for key, value in module.state_dict().items())


def test_conversion_raises_for_layers_torch_cannot_express():
    with pytest.raises(UserError, match=r"a shortlist and widths \[16, 16\]"):
        make_layer("adaptive", width=48).to_torch()
    with pytest.raises(UserError, match="no shortlist"):
        make_layer("adaptive_leaf", width=128).to_torch()


def test_head_bias_starts_at_log_frequencies():
    counts = np.array([40, 30, 10, 8, 7, 5])
    config = AdaptiveConfig("adaptive", cutoffs=[2, 4], head_bias=True)
    bias = build_output(config, width=16, counts=counts).head_bias
    assert bias is not None
    np.testing.assert_allclose(bias.detach().exp().numpy(), [0.4, 0.3, 0.18, 0.12], rtol=1e-6)
    whole = build_output(AdaptiveConfig("adaptive", cutoffs=[], head_bias=True), width=16, counts=counts).head_bias
    np.testing.assert_allclose(whole.detach().exp().numpy(), counts / 100, rtol=1e-6)
