"""GPU efficiency of a step: aligned bfloat16 matmuls, and batched matmuls for small classes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lm.output.fused import backward
from tests.helpers.layers import gradients, make_layer

META = torch.device("meta")


class Products(TorchDispatchMode):
    """Records the factors and result of every matmul."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.__name__.split(".")[0] in ("mm", "addmm", "bmm"):
            self.found.append((*(a for a in args if isinstance(a, torch.Tensor)), result)[-3:])
        return result


def step_of(name, *, vocab_size=44_372, width=64, dtype=torch.float32):
    """Return a function that computes a layer's loss and gradients on the meta device."""
    cutoffs = (vocab_size // 20, vocab_size // 4)
    layer = make_layer(name, width=width, vocab_size=vocab_size, cutoffs=cutoffs, samples=0.2, dtype=dtype).to(META)
    targets = torch.multinomial(1 / torch.arange(3.0, vocab_size + 3), 2560, replacement=True).view(20, 128)
    plan = layer.plan(targets).to(META)
    hidden = torch.zeros(20, 128, width, device=META, requires_grad=True, dtype=dtype)
    return lambda: backward([layer.loss(hidden, targets.to(META), plan)])


@pytest.mark.parametrize("name", ["adaptive", "full", "sampled", "hsm_freq"])
def test_bfloat16_matmuls_are_aligned_and_return_float32(name):
    """Aligned to 16 bytes, as tensor cores require. Only a tail's projection is a plain module matmul."""
    step = step_of(name, width=512, dtype=torch.bfloat16)
    with Products() as products:
        step()
    narrow = {torch.bfloat16} if name == "adaptive" else set()
    assert {result.dtype for *_, result in products.found} == {torch.float32} | narrow
    for matrices in products.found:
        for matrix in matrices:
            rows, columns = matrix.stride()[-2:]
            assert min(rows, columns) == 1 and max(rows, columns) * matrix.element_size() % 16 == 0, matrix.shape


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
