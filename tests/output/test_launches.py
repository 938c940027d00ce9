"""How many operations a step launches on a device, and the batched products that keep them few."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lm.output.fused import unit_gradient
from tests.helpers.layers import gradients, make_layer

META = torch.device("meta")

NOT_LAUNCHED = """
    view _unsafe_view _reshape_alias t transpose permute slice select narrow expand unsqueeze squeeze detach alias
    as_strided split split_with_sizes unbind empty empty_like empty_strided new_empty new_empty_strided promote_types
""".split()  # noqa: SIM905
"""Views, memory that nobody writes to yet, and what is only asked on the host."""
MOST_LAUNCHES = 320
"""Of a layer's loss and gradients; its vocabulary has 44,372 words, and its hierarchy 211 classes."""


class Launches(TorchDispatchMode):
    """Counts the operations of a step by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        self.counts[name] += name not in NOT_LAUNCHED
        return func(*args, **(kwargs or {}))


class Products(TorchDispatchMode):
    """Notes the factors and the result of every product of matrices."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.__name__.split(".")[0] in ("mm", "addmm", "bmm"):
            self.found.append((*(a for a in args if isinstance(a, torch.Tensor)), result)[-3:])
        return result


def step_of_44k_words(name, dtype, *, width=64):
    """A function that computes the loss and gradients of a layer on the meta device."""
    layer = make_layer(name, width=width, vocab_size=44_372, cutoffs=(2000, 10_000), samples=0.2, dtype=dtype)
    layer.to("meta")
    targets = torch.multinomial(1 / torch.arange(3.0, 44_375), 2560, replacement=True).view(20, 128)
    plan = layer.plan(targets).to(META)
    hidden = torch.zeros(20, 128, width, device=META, requires_grad=True, dtype=dtype)
    return lambda: layer.loss(hidden, targets.to(META), plan).backward(unit_gradient(META))


@pytest.mark.parametrize("name", ["adaptive", "full", "sampled", "dsoftmax", "dsoftmax_star", "hsm_freq"])
def test_launches_do_not_grow_with_the_vocabulary(name):
    step = step_of_44k_words(name, torch.float32)
    with Launches() as launches:
        step()
    assert launches.counts.total() <= MOST_LAUNCHES, launches.counts.most_common()


@pytest.mark.parametrize("name", ["adaptive", "full", "sampled", "hsm_freq"])
def test_bfloat16_products_read_aligned_rows_and_hand_out_float32(name):
    """Aligned to 16 bytes, as a GPU's matrix units ask. A tail's projection alone is the module's own product."""
    step = step_of_44k_words(name, torch.bfloat16, width=512)
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
def test_batched_products_are_those_class_by_class(name, dtype):
    """More tokens of a class than a tile has, classes without any, classes of one word."""
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
