"""Times the blocks that an output layer is made of: one fused softmax, behind a projection where it has one.

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
from lm.system.precision import Precision, autocast, matmul_precision

SECONDS_PER_POINT = 0.1
"""Repetitions of a point stop when they have taken so long; the least of them counts, as the least disturbed."""
MOST_REPEATS = 7
LEFT_BEHIND = 8
"""A GPU's blocks grow until they take so many times as long as the least of them, which is what launching takes."""
MOST_WEIGHTS, MOST_WORDS = 1 << 27, 1 << 21
"""But no further: half a GiB of word vectors, more words than a vocabulary has."""
LONGEST = 0.2
"""Seconds beyond which a GPU's block is not timed; shorter ones have told enough by then."""
PIPELINED_SECONDS = 0.02
"""How long the repetitions between two events on a GPU take together."""
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


def grown_points(
    seconds: Callable[[int, int], float], *, tokens: int, width: int, head: bool
) -> dict[tuple[int, int], float]:
    """Times of a GPU's blocks by (words, tokens): four times the words each round, until launching is left behind.

    What launching hides of a small block no fit can find. A fast GPU hides blocks of thousands of words.
    """
    found: dict[tuple[int, int], float] = {}
    words = 64
    while words * width <= MOST_WEIGHTS and words <= MOST_WORDS:
        for divisor in (8, 1) if head else (100, 20, 4):
            point = (words, max(1, tokens // divisor))
            if 4 * found.get((words // 4, point[1]), 0.0) < LONGEST:
                try:
                    found[point] = seconds(*point)
                except torch.OutOfMemoryError:
                    return found
        fewest = min(tokens for _, tokens in found)
        if found.get((words, fewest), LONGEST) > LEFT_BEHIND * min(found.values()):
            break
        words *= 4
    return found


@dataclass(frozen=True)
class BlockTimer:
    """Times forward and backward passes of blocks of one width, as the layers' `loss` does them.

    On a GPU the update of the word vectors is timed with them: there it takes as long as a product with few tokens.
    """

    width: int
    full_width: int
    """Of the hidden state; a narrower block has a projection."""
    device: torch.device
    precision: Precision

    def seconds(self, words: int, tokens: int) -> float:
        step = self._block(words, tokens)
        step()  # buffers are made, kernels are found
        if self.device.type == "cuda":
            return self._pipelined(step)
        # One thread is timed by the processor's clock, which does not advance while another process has the core.
        clock = time.process_time if self.device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
        times: list[float] = []
        began = time.monotonic()
        while not times or (len(times) < MOST_REPEATS and time.monotonic() - began < SECONDS_PER_POINT):
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
        """Adagrad's, which reads and writes as much as other optimizers' within a fourth."""
        assert weight_kW.grad is not None
        steps = [torch.zeros((), device=self.device)]
        options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 1e-6, "lr_decay": 0.0, "eps": 1e-10, "maximize": False}
        with torch.no_grad():
            adagrad([weight_kW], [weight_kW.grad], [sums_kW], steps, fused=True, has_sparse_grad=False, **options)

    def _pipelined(self, step: Callable[[], None]) -> float:
        """Seconds of one of many repetitions given to the GPU at once, as in training; the least of three rounds."""
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
