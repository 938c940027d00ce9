"""Building blocks of the fused loss: chunk sizes, matmuls into existing buffers, and row-wise losses.

Shapes: n rows in a chunk, K words, P with padding; `_1` is a kept dimension of size one.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from lm.system.memory import has_data

CHUNK_ELEMENTS = 1 << 22
"""Logits per chunk on a CPU: 16 MiB of float32. Chunks may grow to the size of the weights."""
GPU_CHUNK_ELEMENTS = 1 << 27
"""Logits per chunk on a GPU: 512 MiB of float32. Each chunk costs kernel launches, and it need not fit in a cache.
The fixed size makes rounding identical in every process, so a resumed run matches an uninterrupted one."""
FEWEST_ROWS = 128
"""With fewer rows, matmuls are bound by reading the weights."""
WHOLE_ROWS, WHOLE_ELEMENTS = 512, 1 << 25
"""Batches up to this many rows and logits, as in rare clusters, form one chunk: smaller matmuls would be slow."""
WIDE_WORDS, THINNEST_WIDTH, THIN_WIDTH = 1 << 16, 16, 64
"""Logits are computed twice for many words and a small width: a fourth thin matmul is cheaper than moving a wide chunk.
Up to `THINNEST_WIDTH` that always pays off; up to `THIN_WIDTH`, only if one chunk cannot hold all logits."""
BLOCK_ELEMENTS = 1 << 19
"""Logits per block when splitting by words: 2 MiB of float32, to fit in the cache."""


def chunk_rows(num_rows: int, *, num_words: int, num_weights: int, kind: str) -> int:
    """Rows per chunk, chosen so that chunks are nearly equal."""
    if kind != "cpu":
        num_chunks = math.ceil(num_rows * num_words / GPU_CHUNK_ELEMENTS)
        return max(1, math.ceil(num_rows / max(1, num_chunks)))
    if num_rows <= WHOLE_ROWS and num_rows * num_words <= WHOLE_ELEMENTS:
        return max(1, num_rows)
    # A chunk may be as large as the weights, because their gradient needs as much memory anyway.
    most = max(CHUNK_ELEMENTS, num_weights) // num_words
    num_chunks = max(1, math.ceil(num_rows / max(most, FEWEST_ROWS)))
    return max(1, math.ceil(num_rows / num_chunks))


def is_wide_and_thin(num_rows: int, num_words: int, width: int) -> bool:
    """Whether computing logits twice in blocks of words is faster than storing chunks of rows."""
    most = THIN_WIDTH if num_rows * num_words > WHOLE_ELEMENTS else THINNEST_WIDTH
    return num_rows > 0 and num_words > WIDE_WORDS and width <= most


def block_words(num_rows: int) -> int:
    """Words per block when splitting by words: whole cache lines; see `aligned`."""
    return max(16, BLOCK_ELEMENTS // num_rows // 16 * 16)


def slices(total: int, size: int) -> list[slice]:
    """Cut a range into slices of this size; the last one may be shorter."""
    return [slice(first, min(first + size, total)) for first in range(0, total, size)]


def aligned(like: Tensor, rows: int, columns: int, *, factors: torch.dtype) -> Tensor:
    """Allocate a matrix with rows padded to multiples of 64 bytes: matmuls into it are up to a third faster.

    Rows stay aligned when the matrix is cast to the factors' dtype.
    """
    step = 64 // factors.itemsize
    return like.new_empty(rows, -(-columns // step) * step)


def product(a: Tensor, b: Tensor, *, out: Tensor, add: bool = False) -> Tensor:
    """`out` (+)= a @ b; `out` may have a wider dtype than the factors (float32 for bfloat16)."""
    if a.dtype == out.dtype:
        return torch.addmm(out, a, b, beta=int(add), out=out)
    if sums_in(out.dtype, a):
        return torch.addmm(out, a, b, out.dtype, beta=int(add), out=out)
    result = torch.mm(a, b)
    return out.add_(result) if add else out.copy_(result)


def batched_product(a: Tensor, b: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Batched a @ b, returned in `dtype`, which may be wider than the factors' dtype."""
    if a.dtype != dtype and sums_in(dtype, a):
        return torch.bmm(a, b, dtype)
    return torch.bmm(a, b).to(dtype)


def sums_in(dtype: torch.dtype, factor: Tensor) -> bool:
    """Whether matmuls of narrow factors can return sums in `dtype`; a CPU and older versions of torch round first."""
    if dtype is not torch.float32 or factor.device.type == "cpu":
        return False
    return not has_data(factor) or has_wide_sums(factor.device, factor.dtype)


@cache
def has_wide_sums(device: torch.device, dtype: torch.dtype) -> bool:
    """Test whether the device's matmuls can return float32 sums, once per process."""
    square, total = torch.zeros(16, 16, device=device, dtype=dtype), torch.zeros(16, 16, device=device)
    with suppress(RuntimeError, TypeError):
        return torch.addmm(total, square, square, total.dtype, out=total) is total
    return False


def product_dtype(tensor: Tensor) -> torch.dtype:
    """Matmul dtype for this tensor: autocast's dtype if enabled, else its own."""
    kind = tensor.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if autocast else tensor.dtype


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Disable autocast, so factors are cast once and sums never. The meta device has no autocast."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def sum_dtype(tensor: Tensor) -> torch.dtype:
    """Accumulation dtype for products of this tensor: at least float32."""
    return torch.promote_types(tensor.dtype, torch.float32)


RowLoss = Callable[[Tensor, Tensor], Tensor]
"""(logits_nP, target_n1) -> loss per row, (n, 1); overwrites logits with their gradient. Padding holds -inf."""


def softmax_in_place(logits_nP: Tensor, target_n1: Tensor) -> Tensor:
    """Cross-entropy per row, (n, 1); overwrites logits with probabilities."""
    score_n1 = logits_nP.gather(1, target_n1)
    largest_n1 = logits_nP.amax(1, keepdim=True)
    torch.softmax(logits_nP, 1, out=logits_nP)
    # The log-normalizer is the largest logit minus its log-probability; smaller probabilities may underflow to zero.
    return largest_n1 - logits_nP.amax(1, keepdim=True).log() - score_n1


def log_softmax_in_place(logits_nP: Tensor, target_n1: Tensor) -> Tensor:
    """Cross-entropy per row, (n, 1); overwrites logits with log-probabilities. For evaluation: saves one pass."""
    return -torch.log_softmax(logits_nP, 1, out=logits_nP).gather(1, target_n1)


def smoothed(smoothing: float, num_words: int) -> RowLoss:
    """Cross-entropy with label smoothing: `smoothing` of the target is spread evenly over all words."""

    def row_loss(logits_nP: Tensor, target_n1: Tensor) -> Tensor:
        gain_n1 = logits_nP.gather(1, target_n1) - logits_nP[:, :num_words].mean(1, keepdim=True)
        loss_n1 = cross_entropy(logits_nP, target_n1)
        logits_nP[:, :num_words].sub_(smoothing / num_words)
        logits_nP.scatter_add_(1, target_n1, logits_nP.new_full(target_n1.shape, smoothing))
        return loss_n1 + smoothing * gain_n1

    return row_loss


def cross_entropy(logits_nP: Tensor, target_n1: Tensor) -> Tensor:
    """-log softmax(logits)[target] per row, (n, 1); overwrites logits with the gradient, softmax - onehot."""
    loss_n1 = softmax_in_place(logits_nP, target_n1)
    logits_nP.scatter_add_(1, target_n1, logits_nP.new_full(target_n1.shape, -1))
    return loss_n1


# ---- losses that compute their gradients in the forward pass ---------------------------------------------------------


Compute = Callable[[Sequence[bool]], tuple[Tensor, Sequence[Tensor | None]]]
"""Maps one needs-grad flag per tensor (empty for no gradients) to the loss and the tensors' gradients."""


def precomputed(compute: Compute, *tensors: Tensor | None) -> Tensor:
    """Return the loss that `compute` finds; the backward pass only returns the gradients that it found as well."""
    if not torch.is_grad_enabled():
        return compute(())[0]
    return cast(Tensor, _Precomputed.apply(compute, *tensors))  # type: ignore[no-untyped-call]


class _Precomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Compute, *tensors: Tensor | None) -> Tensor:
        ctx.compute, ctx.wanted = compute, ctx.needs_input_grad[1:]
        loss, ctx.grads = compute(ctx.wanted)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # The gradients are as large as the weights, so they are scaled in place and released. Backpropagating through a
        # retained graph a second time, which training never does, recomputes them.
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            _, grads = ctx.compute(ctx.wanted)
        (factor,) = grad_outputs
        if factor.device.type == "cpu" and has_data(factor) and factor == 1:  # as in training; saves a pass over them
            return None, *grads
        return None, *(None if grad is None else grad.mul_(factor) for grad in grads)
