"""Adagrad, the paper's optimizer (section 5): the accumulator starts at 1e-5, and L2 decay is added after clipping.

The word embedding can be updated in three ways (`optim.embedding`):

- `sparse`: an accumulator per element; only the batch's rows are touched. Decay is lazy: a row that was idle for n
  steps is multiplied by (1 - lr wd / sqrt(acc))^n when it is next read or when `apply_pending_decay` is called, where a
  step at a part of the rate counts as that part of a step. That is what the dense form does to it, but for terms of
  the order of wd^2: the decay's own share in the accumulator, and, where the rate changes, the powers of it.
- `rowwise`: an accumulator per word, fed with the mean square of each occurrence's gradient; not clipped, not decayed.
- `dense`: the table is an ordinary parameter.

Shapes: U distinct rows of a batch, N uses of them, E width, V rows of the table.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.optim.adagrad import adagrad

from lm.config.groups import OptimConfig
from lm.config.registry import plugin
from lm.config.rules import Range
from lm.optim.optimizer import DenseUpdate, FusedUpdate, LazyDecay, Optimizer, RowUpdate
from lm.optim.sparse_table import SparseTable

ACCUMULATOR_START = 1e-5
"""As in the paper's and the released settings: with torch's 0, decay alone would move an idle row by lr at once."""
EPSILON = 1e-10


@dataclass
class AdagradConfig(OptimConfig):
    """Adagrad with global-norm clipping."""

    name: str = "adagrad"
    weight_decay: Annotated[float, Range(least=0)] = 1e-6
    """L2 decay, added to the gradient after clipping."""
    accumulator_start: Annotated[float, Range(least=1e-30, most=1e30)] = ACCUMULATOR_START
    """What the sums of squared gradients begin at; larger ones make the first steps smaller."""

    def problems(self) -> Iterator[str]:
        # Lazy decay multiplies an idle row by 1 - lr wd / sqrt(start) a step, which must stay positive.
        most = 0.95 * math.sqrt(self.accumulator_start)
        if self.lr * self.weight_decay >= most:
            lr_is_to_blame = self.lr > 1 and 0.1 * self.weight_decay < most
            fix = "lr=0.1" if lr_is_to_blame else f"weight_decay={0.1 * most / self.lr:.1g}"
            yield (
                f"optim.lr times optim.weight_decay must be below {most:.1g}, 0.95 times the square root of "
                f"optim.accumulator_start={self.accumulator_start:g}; got optim.lr={self.lr:g} and "
                f"optim.weight_decay={self.weight_decay:g}. Try optim.{fix}"
            )


@plugin("optim", "adagrad", AdagradConfig)
class Adagrad(Optimizer):
    """Adagrad on everything; the word embedding in one of three forms."""

    config: AdagradConfig

    def dense_update(self, parameters: list[nn.Parameter]) -> DenseUpdate:
        return DenseAdagrad(parameters, config=self.config)

    def row_update(self, name: str, table: SparseTable) -> RowUpdate:
        return RowwiseAdagrad(table, self) if self.by_word(name) else SparseAdagrad(table, self)

    @classmethod
    def pending_decay(cls, state: dict[str, Tensor], rows: Tensor | slice, idle_U: Tensor, config: Any) -> Tensor:
        """(1 - lr wd / sqrt(acc))^idle, through the logarithm because the base is next to 1."""
        rate = config.lr * config.weight_decay
        return state["accumulator"][rows].rsqrt().mul_(-rate).log1p_().mul_(idle_U[:, None]).exp_()


class DenseAdagrad(FusedUpdate):
    """torch's Adagrad on whole parameters."""

    def __init__(self, parameters: list[nn.Parameter], *, config: AdagradConfig) -> None:
        super().__init__(parameters, start={"sum": config.accumulator_start})
        self.weight_decay = config.weight_decay

    def update(
        self, weights: list[Tensor], gradients: list[Tensor], state: dict[str, list[Tensor]], **options: Any
    ) -> None:
        settings: dict[str, Any] = {"weight_decay": self.weight_decay, "lr_decay": 0.0, "eps": EPSILON}
        adagrad(weights, gradients, state["sum"], state["step"], has_sparse_grad=False, **settings, **options)


class SparseAdagrad(LazyDecay):
    """An accumulator per element, lazy decay: the dense form at the cost of the batch's rows."""

    def __init__(self, table: SparseTable, optimizer: Adagrad) -> None:
        super().__init__(table, optimizer, weight_decay=optimizer.config.weight_decay)
        self.state = {"accumulator": torch.full_like(table.weight, optimizer.config.accumulator_start), **self.state}

    def step(self, *, divisor: Tensor, scale: float) -> None:  # noqa: ARG002
        rows_U, optimizer = self.rows_U, self.optimizer
        old_UE, old_accumulator_UE = self.table.weight[rows_U], self.state["accumulator"][rows_U]
        grad_UE = self.grad_UE / divisor
        if self.weight_decay:
            grad_UE = grad_UE.add_(old_UE, alpha=self.weight_decay)
        accumulator_UE = old_accumulator_UE.addcmul(grad_UE, grad_UE)
        weight_UE = old_UE.addcdiv(grad_UE, accumulator_UE.sqrt().add_(EPSILON), value=-optimizer.lr)
        self.table.weight[rows_U] = torch.where(optimizer.frozen, old_UE, weight_UE)
        self.state["accumulator"][rows_U] = torch.where(optimizer.frozen, old_accumulator_UE, accumulator_UE)
        self.mark_decayed(rows_U)


class RowwiseAdagrad(RowUpdate):
    """An accumulator per word, fed with the mean square of each occurrence's gradient; not clipped, not decayed."""

    clipped = False

    def __init__(self, table: SparseTable, optimizer: Adagrad) -> None:
        super().__init__(table, optimizer)
        start = optimizer.config.accumulator_start
        self.state = {"accumulator": table.weight.new_full((len(table.weight),), start)}

    def step(self, *, divisor: Tensor, scale: float) -> None:  # noqa: ARG002
        rows_U = self.rows_U
        old_U, old_UE = self.state["accumulator"][rows_U], self.table.weight[rows_U]
        if self.inverse_N is None:  # the rows were read once for all their occurrences, and are averaged over the ranks
            accumulator_U = old_U + self.grad_UE.square().mean(-1).mul_(scale**2)
        else:
            square_N = self.grad_NE.square().mean(-1)
            added_U = torch.zeros_like(old_U).index_add_(0, self.inverse_N, square_N)
            # A rank's gradient is that of the mean over its own tokens, as many times larger as there are ranks.
            ranks = self.optimizer.ranks
            accumulator_U = old_U + ranks.sum(added_U).mul_((scale / ranks.size) ** 2)
        step_size = self.optimizer.lr * scale
        weight_UE = old_UE.addcdiv(self.grad_UE, accumulator_U.sqrt().add_(EPSILON)[:, None], value=-step_size)
        self.table.weight[rows_U] = torch.where(self.optimizer.frozen, old_UE, weight_UE)
        self.state["accumulator"][rows_U] = torch.where(self.optimizer.frozen, old_U, accumulator_U)
