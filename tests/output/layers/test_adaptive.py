"""Adaptive softmax: conversion from and to torch's module."""

import numpy as np
import pytest
import torch
from torch import nn

from lm.output.base import build_output
from lm.output.layers.adaptive import AdaptiveConfig, AdaptiveSoftmax
from lm.system.errors import UserError
from tests.helpers.layers import make_layer


def torch_module(*, head_bias=False, div_value=4.0, width=64) -> nn.AdaptiveLogSoftmaxWithLoss:
    torch.manual_seed(0)
    return nn.AdaptiveLogSoftmaxWithLoss(width, 60, [10, 30], div_value=div_value, head_bias=head_bias)


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
