"""Times blocks of an output layer: an optional projection and one fused softmax.

Shapes: n tokens, D width of the hidden state, W width of the block, k words.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.adagrad import adagrad

from lm.output.fused import softmax_loss
from lm.system.devices import Precision, autocast, matmul_precision

REPEATS, POINT_SECONDS = 3, 0.1
"""Maximum repetitions and seconds per measurement. The minimum time is used, as the least disturbed."""
PIPELINED_SECONDS = 0.02
"""On a GPU, target time for the repetitions between two events."""
FEWEST_WORDS, GROWTH = 60, 4
"""Words in the smallest block, and the growth factor. Sizes are not powers of two: rows of such lengths map to the same
cache lines and can be twice as slow."""
PAST_OVERHEAD = 8
"""Blocks grow until the one with the fewest tokens takes this many times the fastest, which is mostly overhead."""
MAX_SECONDS, MAX_WORDS = 0.2, 1 << 21
MAX_WEIGHTS = {"cpu": 1 << 21, "cuda": 1 << 27}
"""Limits on that growth: seconds per block, words, and weights. On a CPU overhead stops dominating early, but other
processes can hide this."""

Points = dict[tuple[int, int], float]
"""Seconds, keyed by (words, tokens)."""


def time_grid(timer: "BlockTimer", *, tokens: int, head: bool) -> Points:
    """Time blocks of growing size, from mostly overhead to mostly arithmetic.

    A head sees all tokens of a step. It is also timed with few tokens for the paper's objective, where tails are as
    wide as the head. A tail sees between 1% and 25% of the tokens.
    """
    columns = sorted({max(1, tokens // divisor) for divisor in ((8, 1) if head else (100, 20, 4))})
    points: Points = {}
    words = FEWEST_WORDS
    while words <= MAX_WORDS and words * timer.width <= MAX_WEIGHTS[timer.device.type]:
        for column in columns:
            if GROWTH * points.get((words // GROWTH, column), 0.0) < MAX_SECONDS:
                try:
                    points[words, column] = timer.seconds(words, column)
                except torch.OutOfMemoryError:
                    return points
        if points.get((words, columns[0]), MAX_SECONDS) > PAST_OVERHEAD * min(points.values()):
            break
        words *= GROWTH
    return points


@dataclass(frozen=True)
class BlockTimer:
    """Times forward and backward passes of blocks of one width, computed as in the layers' `loss`.

    On a GPU this includes the word vectors' optimizer update, which takes as long as a matmul with few tokens.
    """

    width: int
    full_width: int
    """Width of the hidden state; narrower blocks have a projection."""
    device: torch.device
    precision: Precision

    def seconds(self, words: int, tokens: int) -> float:
        """Measure one forward and backward pass, in seconds."""
        step = self._block(words, tokens)
        step()  # allocates buffers, selects kernels
        if self.device.type == "cuda":
            return self._pipelined(step)
        # With one thread, use process time: it excludes time when another process has the core.
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        times: list[float] = []
        began = time.monotonic()
        while not times or (len(times) < REPEATS and time.monotonic() - began < POINT_SECONDS):
            start = clock()
            step()
            times.append(clock() - start)
        return min(times)

    def _block(self, words: int, tokens: int) -> Callable[[], None]:
        hidden_nD = torch.randn(tokens, self.full_width, device=self.device, requires_grad=True)
        weight_kW = torch.empty(words, self.width, device=self.device).uniform_(-0.05, 0.05).requires_grad_()
        projection_WD = torch.empty(self.width, self.full_width, device=self.device).uniform_(-0.05, 0.05)
        projection_WD.requires_grad_()
        target_n = torch.randint(words, (tokens,), device=self.device)
        sums_kW = torch.ones_like(weight_kW, requires_grad=False) if self.device.type == "cuda" else None

        def step() -> None:
            for tensor in (hidden_nD, weight_kW, projection_WD):
                tensor.grad = None
            with matmul_precision(self.precision):
                with autocast(self.precision, self.device):
                    input_nW = F.linear(hidden_nD, projection_WD) if self.width != self.full_width else hidden_nD
                    loss = softmax_loss([input_nW], [weight_kW], target_n, scale=1 / tokens)
                loss.backward()  # type: ignore[no-untyped-call]
            if sums_kW is not None:
                self._update(weight_kW, sums_kW)

        return step

    def _update(self, weight_kW: Tensor, sums_kW: Tensor) -> None:
        """Run an Adagrad step; other optimizers move a similar number of bytes."""
        assert weight_kW.grad is not None
        steps = [torch.zeros((), device=self.device)]
        options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 1e-6, "lr_decay": 0.0, "eps": 1e-10, "maximize": False}
        with torch.no_grad():
            adagrad([weight_kW], [weight_kW.grad], [sums_kW], steps, fused=True, has_sparse_grad=False, **options)

    def _pipelined(self, step: Callable[[], None]) -> float:
        """Average seconds over repetitions queued together, as in training; minimum of three rounds."""
        repeats, least = 1, float("inf")
        for _ in range(3):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            began.record()
            for _ in range(repeats):
                step()
            ended.record()
            ended.synchronize()
            least = min(least, began.elapsed_time(ended) / 1e3 / repeats)
            repeats = max(1, min(200, int(PIPELINED_SECONDS / least)))
        return least
