"""Batched matmuls for small classes, as on a GPU."""

import pytest
import torch

from tests.helpers.layers import gradients, make_layer


@pytest.mark.parametrize("name", ["hsm_freq", "hsm_sim"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_bucketed_loss_matches_loop_over_classes(name, dtype):
    """Covers classes with more tokens than a tile, classes without tokens, and one-word classes."""
    layer = make_layer(name, vocab_size=300)
    torch.manual_seed(1)
    targets = torch.cat([torch.randint(300, (9, 5)), torch.randint(4, (9, 5))])
    targets[2, 3] = -100
    hidden = torch.randn(18, 5, 16, dtype=torch.float64, requires_grad=True)
    plan = layer.plan(targets)
    one_by_one = layer.loss(hidden, targets, plan)
    one_by_one.backward()
    expected, hidden_grad = gradients(layer), hidden.grad
    layer.zero_grad()
    hidden.grad = None
    with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
        batched = layer.loss(hidden, targets, layer.with_buckets(plan))
    (2 * batched).backward()
    tolerance = {"rtol": 0.05, "atol": 0.02} if dtype is torch.bfloat16 else {"rtol": 1e-12, "atol": 1e-14}
    torch.testing.assert_close(batched.double(), one_by_one, **tolerance)
    torch.testing.assert_close(hidden.grad, 2 * hidden_grad, **tolerance)
    for key, grad in gradients(layer).items():
        torch.testing.assert_close(grad, 2 * expected[key], **tolerance)
