"""Predicts the time of an output-layer block from its size, measured on this machine (section 4.1 of the paper).

A block is one softmax over `words` words for `tokens` tokens, forward and backward, after a projection in tails. It is
timed using the training code. At a given width, its time is modeled as

    max(floor, constant + per_pair * words * tokens + per_word * words + per_token * tokens)

The paper's model has the first two terms. For clusters with few tokens, a CPU spends as much time on reading and
writing word vectors (`per_word`) and on the projection (`per_token`), and a GPU on launching kernels (the floor).
Coefficients are never negative, so larger blocks never get faster. The cluster search relies on this.
"""

import json
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.optim.adagrad import adagrad

from lm.output.fused import softmax_loss
from lm.system.console import say
from lm.system.devices import Precision, autocast, matmul_precision, using_threads
from lm.system.errors import UserError
from lm.system.files import write_text

MAX_ERROR = 0.15
"""A fit with a larger mean relative error is used but not saved: the machine was probably busy."""
SECONDS, MAX_ROUNDS = 4.0, 5
"""Limits on the timing rounds: total seconds and number of rounds. The first round always completes."""
FORMAT = 1

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class BlockCost:
    """Time of a block of one width, as a function of words and tokens."""

    floor: float
    constant: float
    per_pair: float
    per_word: float
    per_token: float
    error: float = 0.0
    """Mean relative error of the fit on the measured grid."""

    def seconds(self, words: Any, tokens: Any) -> Any:
        linear = self.constant + self.per_pair * words * tokens + self.per_word * words + self.per_token * tokens
        return np.maximum(self.floor, linear)


@dataclass(frozen=True)
class CostModel:
    """Costs of the head and tails 1, 2, ... for one hidden width."""

    source: str
    """Origin of the model, shown in the log."""
    blocks: tuple[BlockCost, ...]
    """Head first; tails include their projections."""

    def block(self, number: int) -> BlockCost:
        """Return the cost of the head (0) or a tail; tails beyond the measured ones cost the same as the last."""
        return self.blocks[min(number, len(self.blocks) - 1)]

    @property
    def error(self) -> float:
        return max(block.error for block in self.blocks)


def flops_model(widths: Sequence[int]) -> CostModel:
    """Build a model without measurements: matmul FLOPs at 1 GFLOP/s. Only ratios of its times are meaningful."""
    head, *tails = widths
    blocks = [BlockCost(0.0, 0.0, 6e-9 * head, 0.0, 0.0)]
    blocks += [BlockCost(0.0, 0.0, 6e-9 * width, 0.0, 6e-9 * head * width) for width in tails]
    return CostModel("counted flops", tuple(blocks))


# ---- timing blocks ---------------------------------------------------------------------------------------------------
#
# Shapes: n tokens, D width of the hidden state, W width of the block, k words.


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


# ---- measuring -------------------------------------------------------------------------------------------------------


def measured_model(
    widths: Sequence[int], tokens: int, device: torch.device, precision: Precision, *, cache_dir: Path
) -> CostModel:
    """Load the cost model for these widths (head first) from the cache, or measure and save it."""
    path = cache_dir / f"cost-{FORMAT}-{_machine(device, precision)}-{'-'.join(map(str, widths))}-{tokens}.json"
    with suppress(UserError):  # missing or damaged
        saved = load_model(path)
        return replace(saved, source=saved.source.replace(f", saved in {path.name}", ", earlier"))
    say(f"timing blocks of the output layer on {device} (once; saved in {path.parent})")
    timers = [BlockTimer(width, full_width=widths[0], device=device, precision=precision) for width in widths]
    model = measure(timers, tokens=tokens, source=f"measured on {device}")
    if model.error > MAX_ERROR and device.type == "cpu" and torch.get_num_threads() > 1:
        # Threads wait for each other on a busy machine. A single thread can be timed by process time, and the
        # choice of clusters depends only on ratios.
        with using_threads(1):
            model = measure(timers, tokens=tokens, source=f"measured on one thread of a busy {device}")
    if model.error <= MAX_ERROR:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_model(model, path)
    else:
        say(f"the cost model is not saved: its fit error is {model.error:.0%}, because the machine is busy")
    return model


def measure(timers: Sequence[BlockTimer], *, tokens: int, source: str) -> CostModel:
    """Time all blocks, repeat in rounds while time remains, and fit each block's minimum.

    Other processes slow down part of a round, but rarely the same part of the next one.
    """
    until = time.monotonic() + SECONDS
    grids = [time_grid(timer, tokens=tokens, head=number == 0) for number, timer in enumerate(timers)]
    for _ in range(MAX_ROUNDS - 1):
        for timer, points in zip(timers, grids, strict=True):
            for point in points:
                if time.monotonic() < until:
                    points[point] = min(points[point], timer.seconds(*point))
    return CostModel(source, tuple(map(fit, grids)))


def save_model(model: CostModel, path: Path) -> None:
    write_text(path, json.dumps({"format": FORMAT, **asdict(model)}, indent=1) + "\n")


def load_model(path: Path) -> CostModel:
    """Load a saved model; raises UserError if the file is not a cost model."""
    try:
        values = json.loads(path.read_bytes())
        blocks = tuple(BlockCost(**{k: float(v) for k, v in block.items()}) for block in values["blocks"])
        sound = values["format"] == FORMAT and blocks and all(v >= 0 for b in blocks for v in asdict(b).values())
        if not sound:
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"output.cost_model must be null, flops or the path of a saved cost model of format {FORMAT}; got {path}. "
            "Try output.cost_model=null to measure one."
        ) from None
    return CostModel(f"{values['source']}, saved in {path.name}", blocks)


# ---- fitting -------------------------------------------------------------------------------------------------------


def fit(points: Points) -> BlockCost:
    """Least-squares fit of relative error, trying measured times as candidate floors."""
    words, tokens = np.array(list(points), dtype=np.float64).T
    seconds = np.array(list(points.values()))
    columns = np.stack([np.ones_like(words), words * tokens, words, tokens], axis=1)
    best, least = BlockCost(0.0, 0.0, 0.0, 0.0, 0.0), np.inf
    for floor in [0.0, *np.sort(seconds)[: len(seconds) // 2]]:
        above = seconds > floor
        if not above.any():
            break
        block = BlockCost(float(floor), *_nonnegative(columns[above] / seconds[above, None]).tolist())
        errors = np.abs(block.seconds(words, tokens) / seconds - 1)
        if (squared := float(np.square(errors).sum())) < least:
            best, least = replace(block, error=float(errors.mean())), squared
    return best


def _nonnegative(columns: Floats) -> Floats:
    """Solve least squares of columns @ x = 1 with x >= 0 by trying every subset of columns.

    Every subset includes the second column (pairs), which is needed to extrapolate to larger blocks.
    """
    num_columns = columns.shape[1]
    best, best_error = np.zeros(num_columns), float(len(columns))
    for size in range(1, num_columns + 1):
        for chosen in (c for c in combinations(range(num_columns), size) if 1 in c):
            solution, *_ = np.linalg.lstsq(columns[:, chosen], np.ones(len(columns)), rcond=None)
            error = float(np.square(columns[:, chosen] @ solution - 1).sum())
            if (solution >= 0).all() and error < best_error:
                best, best_error = np.zeros(num_columns), error
                best[list(chosen)] = solution
    return best


def _machine(device: torch.device, precision: Precision) -> str:
    if device.type == "cuda":
        name = f"{torch.cuda.get_device_name(device)}-pipelined"
    else:
        name = f"{platform.processor() or platform.machine()}-{torch.get_num_threads()}-threads"
    text = f"{name}-{precision}-torch-{torch.__version__}"
    return "".join(c if c.isalnum() or c in ".-" else "_" for c in text)
