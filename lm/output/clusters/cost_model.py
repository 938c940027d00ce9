"""How long a block of the output layer takes, measured here and now (section 4.1 of the paper).

A block is one softmax over `words` words for `tokens` tokens, forward and backward, with its projection where it has
one: exactly the code that trains. Its time at a given width is modelled as

    max(floor, constant + per_pair * words * tokens + per_word * words + per_token * tokens)

The paper's model is the first two terms. On a processor the traffic of the word vectors and of their gradient
(`per_word`), and the projection (`per_token`), weigh as much where a cluster sees few tokens; on a GPU the floor does.
Coefficients are never negative, so the time never falls as a block grows, which the search for the best clusters needs.
"""

import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lm.output.clusters.block_timing import BlockTimer, grid_for, grown_points
from lm.system.devices import using_threads
from lm.system.errors import UserError
from lm.system.files import write_text
from lm.system.precision import Precision

WORST_ERROR = 0.15
"""A fit with a larger mean relative error is used but not kept: the machine was busy with something else."""
SECONDS = 4.0
"""For one measurement of all blocks; there are at most two. Where it is short the largest points are left out,
where some is left, disturbed points are timed again."""
MOST_ROUNDS = 8
"""Of timing disturbed points again."""
RESOLVED = 2
"""A slope is known if the longest block of a GPU took so many times what launching takes."""
FORMAT = 1

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class BlockCost:
    """Seconds of a block of one width, as a function of its words and tokens."""

    floor: float
    constant: float
    per_pair: float
    per_word: float
    per_token: float
    error: float = 0.0
    """Mean relative error of the fit over the measured grid."""

    def seconds(self, words: Any, tokens: Any) -> Any:
        linear = self.constant + self.per_pair * words * tokens + self.per_word * words + self.per_token * tokens
        return np.maximum(self.floor, linear)


@dataclass(frozen=True)
class CostModel:
    """The cost of the head and of tails 1, 2, ... of a layer of one width."""

    source: str
    """Where the figures come from, for the log."""
    blocks: tuple[BlockCost, ...]
    """Head first; tail i at its own width, with its projection."""

    def block(self, number: int) -> BlockCost:
        """Tails beyond the measured ones have the narrowest width, like the last of them."""
        return self.blocks[min(number, len(self.blocks) - 1)]

    @property
    def error(self) -> float:
        return max(block.error for block in self.blocks)


def flops_model(widths: Sequence[int]) -> CostModel:
    """Without a measurement: three products per pair of word and token, and the projection's, at one flop a nanosecond.

    Only the ratios of its times mean anything.
    """
    head, *tails = widths
    blocks = [BlockCost(0.0, 0.0, 6e-9 * head, 0.0, 0.0)]
    blocks += [BlockCost(0.0, 0.0, 6e-9 * width, 0.0, 6e-9 * head * width) for width in tails]
    return CostModel("counted flops", tuple(blocks))


def measured_model(
    widths: Sequence[int],
    tokens: int,
    device: torch.device,
    precision: Precision,
    *,
    cache_dir: Path,
    notice: Callable[[str], None],
) -> CostModel:
    """The cost of the blocks of these widths (head first), from the cache or measured now and kept."""
    path = cache_dir / f"cost-{FORMAT}-{_machine(device, precision)}-{'-'.join(map(str, widths))}-{tokens}.json"
    if path.exists():
        kept = load_model(path)
        return replace(kept, source=kept.source.replace(f", saved in {path.name}", ", earlier"))
    notice(f"measuring the output layer's blocks on {device} (once; kept in {path.parent})")
    timers = [BlockTimer(width, full_width=widths[0], device=device, precision=precision) for width in widths]
    model = measure(timers, tokens=tokens, source=f"measured on {device}", notice=notice)
    if model.error > WORST_ERROR and device.type == "cpu" and torch.get_num_threads() > 1:
        # Threads that wait for a core make others wait. One thread alone is timed by the processor's clock, and the
        # choice of clusters depends on ratios only.
        with using_threads(1):
            source = f"measured on one thread of a busy {device}"
            model = measure(timers, tokens=tokens, source=source, notice=notice)
        notice("the machine is busy: measured with one thread")
    if model.error <= WORST_ERROR:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_model(model, path)
    else:
        notice(f"the fit's relative error is {model.error:.0%}, too much to be kept: the machine seems busy")
    return model


def measure(timers: Sequence[BlockTimer], *, tokens: int, source: str, notice: Callable[[str], None]) -> CostModel:
    """Time and fit every block; what another process seems to have disturbed is timed again, while there is time."""
    began = time.monotonic()
    blocks = []
    for number, timer in enumerate(timers):
        if timer.device.type == "cuda":
            points = grown_points(timer.seconds, tokens=tokens, width=timer.width, head=number == 0)
        else:
            points = _grid_points(timer, tokens, head=number == 0, until=began + SECONDS * (number + 1) / len(timers))
        blocks.append(_MeasuredBlock(timer, points))
    _time_again(blocks, until=began + SECONDS)
    hidden = [str(block.timer.width) for block in blocks if not block.resolved]
    if hidden:
        notice(
            f"blocks of width {', '.join(hidden)} take no longer than launching them: their operations are counted "
            "instead, at the speed of the largest"
        )
        source += ", in part counted flops"
    return CostModel(source, tuple(block.cost for block in blocks))


def _time_again(blocks: Sequence["_MeasuredBlock"], *, until: float) -> None:
    for _ in range(MOST_ROUNDS):
        for block in blocks:
            for point in block.disturbed():
                if time.monotonic() > until:
                    return
                block.repeat(point)


def _grid_points(timer: BlockTimer, tokens: int, *, head: bool, until: float) -> dict[tuple[int, int], float]:
    """At least half of a fixed grid."""
    found: dict[tuple[int, int], float] = {}
    grid = grid_for(tokens, width=timer.width, head=head)
    for point in grid:
        if 2 * len(found) < len(grid) or time.monotonic() < until:
            found[point] = timer.seconds(*point)
    return found


class _MeasuredBlock:
    """A block's timings, and the cost that fits them."""

    def __init__(self, timer: BlockTimer, points: dict[tuple[int, int], float]) -> None:
        self.timer = timer
        self.grid, self.seconds_G = list(points), np.array(list(points.values()))
        self.words_G, self.tokens_G = np.array(self.grid, dtype=np.float64).T
        self._fit()

    @property
    def resolved(self) -> bool:
        """Whether launching, which on a GPU is the time of all small blocks, leaves anything to fit a slope to."""
        return self.timer.device.type != "cuda" or self.seconds_G.max() >= RESOLVED * self.seconds_G.min()

    def _fit(self) -> None:
        if self.resolved:
            self.cost = fit(self.words_G, self.tokens_G, self.seconds_G)
            return
        floor = float(np.median(self.seconds_G))
        self.cost = BlockCost(floor, 0.0, floor / float((self.words_G * self.tokens_G).max()), 0.0, 0.0)

    def disturbed(self) -> list[int]:
        """The points to time again, if the fit is poor: a disturbance only ever makes a time longer."""
        if self.cost.error <= WORST_ERROR / 2:
            return []
        longer = self.seconds_G > (1 + WORST_ERROR) * self.cost.seconds(self.words_G, self.tokens_G)
        return [int(point) for point in np.flatnonzero(longer)]

    def repeat(self, point: int) -> None:
        self.seconds_G[point] = min(self.seconds_G[point], self.timer.seconds(*self.grid[point]))
        self._fit()


def save_model(model: CostModel, path: Path) -> None:
    write_text(path, json.dumps({"format": FORMAT, **asdict(model)}, indent=1) + "\n")


def load_model(path: Path) -> CostModel:
    """A saved model; anything else is refused."""
    try:
        values = json.loads(path.read_bytes())
        blocks = tuple(BlockCost(**{k: float(v) for k, v in block.items()}) for block in values["blocks"])
        sound = values["format"] == FORMAT and blocks and all(v >= 0 for b in blocks for v in asdict(b).values())
        if not sound:
            raise ValueError
    except OSError as error:
        raise UserError(
            f"output.cost_model={path} cannot be read: {error.strerror}. Try output.cost_model=null to measure"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"output.cost_model={path} is not a saved cost model of format {FORMAT}. "
            "Try output.cost_model=null to measure one"
        ) from None
    return CostModel(f"{values['source']}, saved in {path.name}", blocks)


# ---- fitting -------------------------------------------------------------------------------------------------------


def fit(words: Floats, tokens: Floats, seconds: Floats) -> BlockCost:
    """The model with the least squared relative error; every floor that a measurement suggests is tried."""
    columns = np.stack([np.ones_like(words), words * tokens, words, tokens], axis=1)
    best: tuple[float, BlockCost] | None = None
    for floor in [0.0, *np.sort(seconds)[: len(seconds) // 2]]:
        above = seconds > floor
        if not above.any():
            break
        coefficients = _nonnegative(columns[above] / seconds[above, None])
        block = BlockCost(float(floor), *(float(c) for c in coefficients))
        errors = np.abs(block.seconds(words, tokens) / seconds - 1)
        squared = float(np.square(errors).sum())
        if best is None or squared < best[0]:
            best = squared, BlockCost(**{**asdict(block), "error": float(errors.mean())})
    assert best is not None
    return best[1]


def _nonnegative(columns: Floats) -> Floats:
    """Least squares of columns @ x = 1 with x >= 0: the best of all sets of columns whose solution is not negative.

    The second column, of the pairs, is in all of them: without it nothing is known of larger blocks.
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
    text = f"{name}-{precision.value}-torch-{torch.__version__}"
    return "".join(c if c.isalnum() or c in ".-" else "_" for c in text)
