"""Times the blocks that an output layer is made of: one fused softmax, behind a projection where it has one.

Shapes: n tokens, D width of the hidden state, W width of the block, k words.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from lm.output.fused import softmax_loss
from lm.system.arithmetic import forward_pass, training_products
from lm.system.precision import Precision

SECONDS_PER_POINT = 0.1
"""Repetitions of a point stop when they have taken so long; the least of them counts, as the least disturbed."""
MOST_REPEATS = 7
HEAD_WEIGHTS, TAIL_WEIGHTS = 1_000_000, 2_000_000
"""Numbers in the largest weight that is timed: of the head, which sees eight times the tokens, and of a tail."""


def grid_for(tokens: int, *, width: int, head: bool) -> list[tuple[int, int]]:
    """(words, tokens) to time, least work first: a head sees every token, a tail from a hundredth to a fourth of them.

    The head is timed with few tokens too, for the paper's objective, whose tails are as wide as it. Time is linear
    long before the largest blocks, so they are kept as small as that allows: less for wide blocks, which are slow.
    """
    divisors = (8, 1) if head else (100, 20, 4)
    # No powers of two: rows of such lengths fall on the same cache lines and take up to twice as long.
    most = min(2000, HEAD_WEIGHTS // width) if head else min(30_000, TAIL_WEIGHTS // width)
    sizes = {max(8, most // divisor) for divisor in (256, 32, 4, 1)}
    grid = [(words, max(1, tokens // divisor)) for words in sizes for divisor in divisors]
    return sorted(grid, key=lambda point: point[0] * point[1])


@dataclass(frozen=True)
class BlockTimer:
    """Times forward and backward passes of blocks of one width, as the layers' `loss` does them."""

    width: int
    full_width: int
    """Of the hidden state; a narrower block has a projection."""
    device: torch.device
    precision: Precision

    def seconds(self, words: int, tokens: int) -> float:
        step = self._block(words, tokens)
        step()  # buffers are made, kernels are found
        self._wait()
        # One thread is timed by the processor's clock, which does not advance while another process has the core.
        clock = time.process_time if self.device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
        times: list[float] = []
        began = time.monotonic()
        while not times or (len(times) < MOST_REPEATS and time.monotonic() - began < SECONDS_PER_POINT):
            start = clock()
            step()
            self._wait()
            times.append(clock() - start)
        return min(times)

    def _block(self, words: int, tokens: int) -> Callable[[], None]:
        hidden_nD = torch.randn(tokens, self.full_width, device=self.device, requires_grad=True)
        weight_kW = torch.empty(words, self.width, device=self.device).uniform_(-0.05, 0.05).requires_grad_()
        projection_WD = torch.empty(self.width, self.full_width, device=self.device).uniform_(-0.05, 0.05)
        projection_WD.requires_grad_()
        target_n = torch.randint(words, (tokens,), device=self.device)

        def step() -> None:
            for tensor in (hidden_nD, weight_kW, projection_WD):
                tensor.grad = None
            with training_products(self.precision):
                with forward_pass(self.precision, self.device):
                    input_nW = F.linear(hidden_nD, projection_WD) if self.width != self.full_width else hidden_nD
                    loss = softmax_loss([input_nW], [weight_kW], target_n, scale=1 / tokens)
                loss.backward()  # type: ignore[no-untyped-call]

        return step

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
