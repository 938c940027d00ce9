"""The fused loss matches plain autograd for any split into chunks and blocks, and never stores all logits."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from lm.output import logits
from lm.output.fused import Group, LogitBias, softmax_loss, softmax_nll
from lm.output.layers.adaptive import AdaptiveSoftmax
from lm.output.layers.hsm import make_buckets
from tests.helpers.layers import gradients, make_layer


def plain_loss(inputs, weights, target, *, scale, bias, groups=None):
    """Reference implementation of `softmax_loss` for autograd."""
    total = torch.zeros(())
    for group in groups or [Group(slice(None), slice(None))]:
        parts = [x[group.rows] @ w[group.words].t() for x, w in zip(inputs, weights, strict=True)]
        scores = torch.cat(parts, dim=1)
        bias.add_to(scores, target[group.rows, None])
        total = total + F.cross_entropy(scores, target[group.rows], reduction="sum")
    return scale * total


def both_ways(inputs, weights, target, *, bias=None, shared=None, groups=None, dtype=None):
    """Return (loss, gradients) of the fused and the plain version, on fresh copies."""
    results = []
    for compute in (softmax_loss, plain_loss):
        tensors = [t.detach().clone().requires_grad_() for t in (*inputs, *weights)]
        half = len(inputs)
        extra = LogitBias(None if bias is None else bias.detach().clone().requires_grad_(), shared)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = compute(tensors[:half], tensors[half:], target, scale=0.3, bias=extra, groups=groups)
        loss.backward()
        grads = [t.grad for t in tensors] + ([] if bias is None else [extra.bias_K.grad])
        results.append((loss.detach(), *grads))
    return results


@pytest.fixture(params=["by rows", "by words"])
def cut_small(request, monkeypatch):
    """Use chunks of a few rows or blocks of 16 words, so small problems cross many boundaries."""
    monkeypatch.setattr(logits, "CHUNK_ELEMENTS", 1)  # chunks may still grow to the weights' size: D rows
    monkeypatch.setattr(logits, "FEWEST_ROWS", 3)
    monkeypatch.setattr(logits, "WHOLE_ELEMENTS", 1)
    monkeypatch.setattr(logits, "BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(logits, "WIDE_WORDS", 0 if request.param == "by words" else 1 << 16)


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("num_words", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 7, 30])
@pytest.mark.usefixtures("cut_small")
def test_single_segment_matches_autograd(num_rows, num_words):
    target = torch.randint(num_words, (num_rows,))
    found, wanted = both_ways([randn(num_rows, 4)], [randn(num_words, 4)], target)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(
    num_rows=st.integers(1, 20),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    with_bias=st.booleans(),
    data=st.data(),
)
def test_segments_bias_and_private_columns_match_autograd(num_rows, sizes, with_bias, data):
    shared = data.draw(st.none() | st.integers(0, sum(sizes)))
    target = torch.randint(sum(sizes), (num_rows,))
    inputs = [randn(num_rows, 2 + i) for i in range(len(sizes))]
    weights = [randn(size, 2 + i) for i, size in enumerate(sizes)]
    bias = randn(sum(sizes)) if with_bias else None
    found, wanted = both_ways(inputs, weights, target, bias=bias, shared=shared)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_cpu_groups_are_not_rounded_to_bfloat16():
    groups = [Group(slice(0, 4), slice(0, 5)), Group(slice(4, 6), slice(5, 12))]
    tensors = [torch.randn(6, 3)], [torch.randn(12, 3)], torch.tensor([0, 4, 1, 2, 6, 0])
    found, _ = both_ways(*tensors, groups=groups, dtype=torch.bfloat16)
    _, wanted = both_ways(*tensors, groups=groups)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_rows_and_words_outside_groups_get_no_gradient():
    groups = [Group(slice(1, 4), slice(0, 5)), Group(slice(4, 5), slice(7, 9))]
    target = torch.tensor([0, 4, 0, 2, 1, 0])
    found, wanted = both_ways([randn(6, 3)], [randn(12, 3)], target, groups=groups)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    _, grad_input, grad_weight = found
    assert not grad_input[[0, 5]].any()
    assert not grad_weight[[5, 6, 9, 10, 11]].any()


@pytest.mark.usefixtures("cut_small")
def test_bfloat16_matmuls_accumulate_in_float32():
    target = torch.randint(200, (64,))
    inputs, weights = [torch.randn(64, 32)], [torch.randn(200, 32) / 5]
    exact, _ = both_ways(inputs, weights, target)
    found, _ = both_ways(inputs, weights, target, dtype=torch.bfloat16)
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.01 * b.norm()


@pytest.mark.usefixtures("cuda", "cut_small")
def test_bfloat16_matmuls_accumulate_in_float32_on_gpu(monkeypatch):
    """Like the CPU test over many chunks, but products are not rounded before accumulation."""
    monkeypatch.setattr(logits, "GPU_CHUNK_ELEMENTS", 1000)
    target = torch.randint(201, (64,), device="cuda")
    tensors = [torch.randn(64, 32, device="cuda"), torch.randn(201, 32, device="cuda") / 5]
    rounded = [t.bfloat16().double().requires_grad_() for t in tensors]
    exact = 0.3 * torch.nn.functional.cross_entropy(rounded[0] @ rounded[1].t(), target, reduction="sum")
    exact.backward()
    tensors = [t.requires_grad_() for t in tensors]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = softmax_loss(tensors[:1], tensors[1:], target, scale=0.3)
    loss.backward()
    assert (loss - exact).abs() < 1e-5 * exact, "logits were not rounded"
    for found, wanted in zip(tensors, rounded, strict=True):
        assert (found.grad - wanted.grad).norm() < 0.01 * wanted.grad.norm()


@pytest.mark.usefixtures("cut_small")
def test_retained_graph_supports_second_backward():
    weight = randn(20, 4).requires_grad_()
    loss = softmax_loss([randn(10, 4)], [weight], torch.randint(20, (10,)), scale=1.0)
    (once,) = torch.autograd.grad(2 * loss, weight, retain_graph=True)
    (again,) = torch.autograd.grad(6 * loss, weight)
    torch.testing.assert_close(3 * once, again)


def test_frozen_weights_get_no_gradient():
    hidden, weight = randn(5, 4).requires_grad_(), randn(9, 4)
    softmax_loss([hidden], [weight], torch.randint(9, (5,)), scale=1.0).backward()
    assert hidden.grad is not None and weight.grad is None
    with torch.no_grad():
        assert not softmax_loss([hidden], [weight], torch.randint(9, (5,)), scale=1.0).requires_grad


@pytest.mark.usefixtures("cut_small")
@pytest.mark.parametrize("shapes", [[(40, 4)], [(5, 6), (50, 4), (33, 2)]], ids=["one segment", "three"])
def test_nll_matches_loss_per_row(shapes):
    inputs, weights = [randn(11, width) for _, width in shapes], [randn(*shape) for shape in shapes]
    logits = torch.cat([x @ w.t() for x, w in zip(inputs, weights, strict=True)], dim=1)
    target = torch.randint(logits.shape[1], (11,))
    nll = softmax_nll(inputs, weights, target)
    torch.testing.assert_close(nll.sum() * 0.3, softmax_loss(inputs, weights, target, scale=0.3))
    torch.testing.assert_close(nll, -logits.log_softmax(1)[torch.arange(11), target])


@pytest.mark.usefixtures("cut_small")
@pytest.mark.parametrize("trained", [False, True])
def test_custom_row_loss_is_not_replaced_by_cross_entropy(trained):
    """Uses sums of squared logits, which must not be computed as cross-entropy by any code path."""

    def squares(logits, target):  # noqa: ARG001
        logits.masked_fill_(logits.isinf(), 0)
        loss = logits.square().sum(1, keepdim=True)
        logits.mul_(2)
        return loss

    hidden, weight = randn(11, 4).requires_grad_(trained), randn(40, 4)
    loss = softmax_loss([hidden], [weight], torch.randint(40, (11,)), scale=1.0, row_loss=squares)
    logits = hidden @ weight.t()
    torch.testing.assert_close(loss, logits.square().sum())
    if trained:
        loss.backward()
        torch.testing.assert_close(hidden.grad, 2 * logits.detach() @ weight)


@pytest.mark.parametrize(
    ("num_words", "width", "device"),
    [
        pytest.param(70_000, 64, "cpu", marks=pytest.mark.slow),
        (50_000, 64, "cpu"),
        (4_000, 512, "cpu"),
        (4_000, 512, "meta"),
    ],
)
def test_logits_are_never_materialized(monkeypatch, num_words, width, device):
    """On a CPU, and on a device with larger chunks."""
    num_rows, largest = 2048, 0
    monkeypatch.setattr(logits, "GPU_CHUNK_ELEMENTS", 1 << 22)
    monkeypatch.setattr(logits, "BLOCK_ELEMENTS", 1 << 22)

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.untyped_storage().nbytes() // result.element_size())
            return result

    with FakeTensorMode():
        hidden = torch.empty(num_rows, width, device=device, requires_grad=True)
        weight = torch.empty(num_words, width, device=device, requires_grad=True)
        target = torch.empty(num_rows, dtype=torch.long, device=device)
        with Watch():
            softmax_loss([hidden], [weight], target, scale=1.0).backward()
    assert largest <= max(hidden.numel(), weight.numel(), 128 * num_words, logits.CHUNK_ELEMENTS + 16 * num_rows)
    assert largest < num_rows * num_words


@pytest.mark.usefixtures("cut_small")
def test_saturated_softmax_is_exact():
    """Logits differ by hundreds: most probabilities underflow, often the target's too, but the loss is exact."""
    torch.manual_seed(0)
    inputs, weights, target = 60 * torch.randn(20, 4), torch.randn(50, 4), torch.randint(50, (20,))
    found, wanted = both_ways([inputs], [weights], target)
    assert found[0] > 100
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_gradients_scale_with_the_loss():
    """The pass that scales the gradients is saved only for a factor of 1."""
    layer, hidden = AdaptiveSoftmax(width=32, vocab_size=60, cutoffs=[10, 30]), torch.randn(40, 32)
    plain, scaled = (
        torch.autograd.grad(factor * layer.loss(hidden, torch.arange(40)), list(layer.parameters()))
        for factor in (1, 3)
    )
    for a, b in zip(plain, scaled, strict=True):
        torch.testing.assert_close(3 * a, b)


# ---- buckets ---------------------------------------------------------------------------------------------------------


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
        buckets = make_buckets(layer.padded_sizes, layer.cluster_sizes, plan.counts)
        batched = layer.loss(hidden, targets, replace(plan, buckets=buckets))
    (2 * batched).backward()
    tolerance = {"rtol": 0.05, "atol": 0.02} if dtype is torch.bfloat16 else {"rtol": 1e-12, "atol": 1e-14}
    torch.testing.assert_close(batched.double(), one_by_one, **tolerance)
    torch.testing.assert_close(hidden.grad, 2 * hidden_grad, **tolerance)
    for key, grad in gradients(layer).items():
        torch.testing.assert_close(grad, 2 * expected[key], **tolerance)
