"""Times the blocks that an output layer is made of: one fused softmax, behind a projection where it has one.

Shapes: n tokens, D width of the hidden state, W width of the block, k words.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from lm.output.fused import softmax_loss

SECONDS_PER_POINT = 0.1
"""Repetitions of a point stop when they have taken so long; the least of them counts, as the least disturbed."""
MOST_REPEATS = 7

Floats = NDArray[np.float64]
Grid = list[tuple[int, int]]


def grid_for(tokens: int, *, head: bool) -> Grid:
    """(words, tokens) to time: the head sees every token, a tail from a hundredth to a third of them."""
    if head:
        return [(words, share) for words in (32, 256, 1024, 4096) for share in (tokens // 2 or 1, tokens)]
    shares = [max(1, tokens // divisor) for divisor in (100, 20, 3)]
    return [(words, share) for words in (64, 1024, 8192, 32768) for share in shares]


def time_blocks(
    width: int, *, full_width: int, grid: Grid, device: torch.device, dtype: torch.dtype
) -> tuple[Floats, Floats, Floats]:
    """Words, tokens and seconds of every point of the grid."""
    seconds = [
        _least_seconds(_block(width, full_width, words, tokens, device, dtype), device) for words, tokens in grid
    ]
    words_G, tokens_G = np.array(grid, dtype=np.float64).T
    return words_G, tokens_G, np.array(seconds)


def _block(
    width: int, full_width: int, words: int, tokens: int, device: torch.device, dtype: torch.dtype
) -> Callable[[], None]:
    """One forward and backward pass, as the layer's `loss` does it."""
    hidden_nD = torch.randn(tokens, full_width, device=device, requires_grad=True)
    weight_kW = torch.empty(words, width, device=device).uniform_(-0.05, 0.05).requires_grad_()
    projection_WD = torch.empty(width, full_width, device=device).uniform_(-0.05, 0.05).requires_grad_()
    target_n = torch.randint(words, (tokens,), device=device)
    tensors = (hidden_nD, weight_kW, projection_WD)

    def step() -> None:
        for tensor in tensors:
            tensor.grad = None
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            input_nW = F.linear(hidden_nD, projection_WD) if width != full_width else hidden_nD
            softmax_loss([input_nW], [weight_kW], target_n, scale=1 / tokens).backward()  # type: ignore[no-untyped-call]

    return step


def _least_seconds(step: Callable[[], None], device: torch.device) -> float:
    step()  # buffers are made, kernels are found
    _wait(device)
    times: list[float] = []
    while len(times) < MOST_REPEATS and sum(times) < SECONDS_PER_POINT:
        start = time.perf_counter()
        step()
        _wait(device)
        times.append(time.perf_counter() - start)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
