"""The matrix products of the fused loss: into existing memory, in autocast's precision."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def aligned(like: Tensor, rows: int, columns: int, *, factors: torch.dtype) -> Tensor:
    """An empty matrix, padded so that rows start at multiples of 64 bytes: products into it take up to a third less.

    They still start there once the matrix is cast to the type of a product's factors.
    """
    step = 64 // factors.itemsize
    return like.new_empty(rows, -(-columns // step) * step)


def product(a: Tensor, b: Tensor, *, out: Tensor, add: bool = False) -> Tensor:
    """`out` (+)= a @ b, where `out` may be wider than the factors (float32 for bfloat16)."""
    if a.dtype == out.dtype:
        return torch.addmm(out, a, b, beta=int(add), out=out)
    if sums_in(out.dtype, a):
        return torch.addmm(out, a, b, out.dtype, beta=int(add), out=out)
    result = torch.mm(a, b)
    return out.add_(result) if add else out.copy_(result)


def batched_product(a: Tensor, b: Tensor, *, dtype: torch.dtype) -> Tensor:
    """a @ b of each pair of matrices, as a tensor of `dtype`, which may be wider than the factors'."""
    if a.dtype != dtype and sums_in(dtype, a):
        return torch.bmm(a, b, dtype)
    return torch.bmm(a, b).to(dtype)


def sums_in(dtype: torch.dtype, factor: Tensor) -> bool:
    """Whether the device's library hands out the wider sums of narrow products; a CPU's rounds them first."""
    return dtype is torch.float32 and factor.device.type in ("cuda", "meta")


def product_dtype(tensor: Tensor) -> torch.dtype:
    """What products of such tensors are computed in."""
    kind = tensor.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if autocast else tensor.dtype


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Products are cast here, once, and sums must not be; the meta device knows no autocast."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def sum_dtype(tensor: Tensor) -> torch.dtype:
    """What sums of such products are kept in."""
    return torch.promote_types(tensor.dtype, torch.float32)
