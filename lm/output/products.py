"""The matrix products of the fused loss: into existing memory, in autocast's precision."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def aligned(like: Tensor, rows: int, columns: int) -> Tensor:
    """An empty matrix, padded so that rows start at multiples of 64 bytes: products into it take up to a third less."""
    step = 64 // like.element_size()
    return like.new_empty(rows, -(-columns // step) * step)


def product(a: Tensor, b: Tensor, *, out: Tensor, add: bool = False) -> Tensor:
    """`out` (+)= a @ b. Where `out` is wider than the factors (bfloat16), sums over chunks still are exact in it."""
    if a.dtype == out.dtype:
        return torch.addmm(out, a, b, beta=int(add), out=out)
    result = torch.mm(a, b)
    return out.add_(result) if add else out.copy_(result)


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
