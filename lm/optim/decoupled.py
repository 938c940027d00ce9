"""Optimizers with moments and decoupled decay: w = (1 - lr wd) w - lr direction, where only the direction differs.

A row of a table is a parameter of its own that is trained in the steps that use it: its moments and their bias
correction know of no other step. While it is idle it only decays, lazily: by (1 - lr wd)^n over n steps, where a step
at a part of the rate counts as that part of a step. Where every step uses every row, that is the dense form; where
the rate changes, idle rows differ from it by terms of the order of (lr wd)^2.

Shapes: U distinct rows of a batch, V rows of the table, E width.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from lm.config.groups import OptimConfig
from lm.config.rules import Range
from lm.optim.lazy_decay import LazyDecay
from lm.optim.optimizer import DenseUpdate, Optimizer, RowUpdate
from lm.optim.sparse_table import SparseTable

Moments = dict[str, Tensor]


@dataclass
class DecoupledConfig(OptimConfig):
    """What these optimizers have in common."""

    weight_decay: Annotated[float, Range(least=0)] = 0.0
    """Share of a weight, times the learning rate, that a step takes away; decoupled from the gradient."""

    def problems(self) -> Iterator[str]:
        if self.lr * self.weight_decay >= 1:
            yield (
                "optim.lr times optim.weight_decay must be below 1, or decay would turn the weights' signs; got "
                f"optim.lr={self.lr:g} and optim.weight_decay={self.weight_decay:g}. "
                f"Try optim.weight_decay={0.01 / self.lr:.1g}"
            )


class DecoupledOptimizer(Optimizer):
    """Subclasses say which moments a weight has, and the direction that follows from them and a gradient."""

    config: DecoupledConfig

    @abstractmethod
    def moments(self, weight: Tensor, *, by_word: bool) -> Moments:
        """At the start; all begin with the weight's rows. `by_word` asks for one second moment per row."""

    @abstractmethod
    def direction(self, moments: Moments, grad: Tensor) -> Tensor:
        """Where the weight goes at rate 1, as a new tensor; the moments are updated in place."""

    def dense_update(self, parameters: list[nn.Parameter]) -> DenseUpdate:
        return DenseDecoupled(parameters, self)

    def row_update(self, name: str, table: SparseTable) -> RowUpdate:
        return DecoupledRows(table, self, by_word=self.by_word(name))

    @classmethod
    def pending_decay(cls, state: Moments, rows: Tensor | slice, idle_U: Tensor, config: Any) -> Tensor:  # noqa: ARG003
        """(1 - lr wd)^idle, through the logarithm because the base is next to 1."""
        return idle_U.mul(math.log1p(-config.lr * config.weight_decay)).exp_()[:, None]

    def move(self, weight: Tensor, moments: Moments, grad: Tensor, *, divisor: Tensor) -> Tensor:
        """One step of a weight, in place; with updates masked it stays as it is, whatever the gradient holds."""
        rate = self.lr * ~self.frozen
        direction = self.direction(moments, torch.where(self.frozen, 0, grad / divisor))
        if self.config.weight_decay:
            weight.mul_(1 - rate * self.config.weight_decay)
        return weight.sub_(direction.mul_(rate))


class DenseDecoupled(DenseUpdate):
    """On whole parameters."""

    def __init__(self, parameters: list[nn.Parameter], optimizer: DecoupledOptimizer) -> None:
        super().__init__(parameters)
        self.optimizer = optimizer
        self.state = {
            number: optimizer.moments(parameter.detach(), by_word=False) for number, parameter in enumerate(parameters)
        }

    def step(self, *, lr: float, divisor: Tensor, frozen: Tensor) -> None:  # noqa: ARG002
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.optimizer.move(parameter, self.state[number], parameter.grad, divisor=divisor)
            parameter.grad = None


class DecoupledRows(LazyDecay):
    """On the rows that a step used."""

    optimizer: DecoupledOptimizer

    def __init__(self, table: SparseTable, optimizer: DecoupledOptimizer, *, by_word: bool) -> None:
        super().__init__(table, optimizer, weight_decay=optimizer.config.weight_decay)
        self.of_rows = optimizer.moments(table.weight.detach(), by_word=by_word)
        self.state |= self.of_rows

    def step(self, *, divisor: Tensor, scale: float) -> None:  # noqa: ARG002
        rows_U = self.rows_U
        moments = {key: value[rows_U] for key, value in self.of_rows.items()}
        self.table.weight[rows_U] = self.optimizer.move(
            self.table.weight[rows_U], moments, self.grad_UE, divisor=divisor
        )
        for key, value in moments.items():
            self.of_rows[key][rows_U] = value
        self.mark_decayed(rows_U)


def start_of_square(weight: Tensor, *, by_word: bool) -> Tensor:
    """A second moment of zeros: one per element, or per row as a column."""
    return torch.zeros_like(weight[:, :1] if by_word else weight)


def feed_square(square: Tensor, grad: Tensor, *, decay: float) -> None:
    """Move a running mean of squares towards those of a gradient, or towards the mean of them in each row."""
    if square.shape == grad.shape:
        square.mul_(decay).addcmul_(grad, grad, value=1 - decay)
    else:
        square.mul_(decay).add_(grad.square().mean(-1, keepdim=True), alpha=1 - decay)
