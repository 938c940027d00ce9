"""Adagrad, the paper's optimizer (section 5). The accumulator starts at 1e-5, and L2 decay is added after clipping.

The word embedding can be updated in three ways (`optim.embedding`):

- `sparse`: one accumulator per element; only the batch's rows are touched. Decay is lazy: a row that was idle for n
  steps is multiplied by (1 - lr wd / sqrt(acc))^n when it is next read or when `apply_pending_decay` is called. A step
  at a fraction of the rate counts as that fraction of a step. The accumulator ignores the decay of idle rows, so the
  result departs from the dense version by a term of order wd^2: up to 0.1% of the largest weight at wd = 1e-4, the
  largest allowed value.
- `rowwise`: one accumulator per word, summing the mean square of each occurrence's gradient. Not clipped or decayed.
- `dense`: the table is an ordinary parameter.

`optim=adagrad_adam` trains the core with Adam instead. Adagrad's first steps are large, which rare words need: they get
few. The core gets a gradient in every step, and under Adam it keeps its pace.

Shapes: U distinct rows in a batch, N uses of them, E width, V rows in the table.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.optim.adagrad import adagrad

from lm.config.groups import OptimConfig, Range, Schedule, plugin
from lm.optim.optimizer import Optimizer, State, TableUpdate, decay_state, fused_state, fused_step
from lm.optim.optimizers.decoupled import adam_step
from lm.optim.sparse_table import SparseTable
from lm.system.errors import UserError
from lm.system.ranks import Ranks

ACCUMULATOR_START = 1e-5
"""With torch's 0, decay alone would move an idle row by lr in one step."""
EPSILON = 1e-10
MOST_LAZY_DECAY = 1e-4
"""Largest `weight_decay` of tables whose decay is lazy."""


@dataclass
class AdagradConfig(OptimConfig):
    """Adagrad with global-norm clipping."""

    name: str = "adagrad"
    weight_decay: Annotated[float, Range(least=0)] = 1e-6
    """L2 decay, added to the gradient after clipping."""
    accumulator_start: Annotated[float, Range(least=1e-30, most=1e30)] = ACCUMULATOR_START
    """Initial value of the sums of squared gradients; larger values make the first steps smaller."""

    def problems(self) -> Iterator[str]:
        # Lazy decay multiplies an idle row by 1 - lr wd / sqrt(start) per step, which must stay positive.
        most = 0.95 * math.sqrt(self.accumulator_start)
        if self.lr * self.weight_decay >= most:
            lr_is_to_blame = self.lr > 1 and 0.1 * self.weight_decay < most
            fix = "lr=0.1" if lr_is_to_blame else f"weight_decay={min(0.1 * most / self.lr, MOST_LAZY_DECAY):.1g}"
            yield (
                f"optim.lr times optim.weight_decay must be below {most:.1g}, 0.95 times the square root of "
                f"optim.accumulator_start={self.accumulator_start:g}; got optim.lr={self.lr:g} and "
                f"optim.weight_decay={self.weight_decay:g}. Try optim.{fix}."
            )


@plugin("optim", "adagrad", AdagradConfig)
class Adagrad(Optimizer):
    """w -= lr g / (sqrt(accumulator) + epsilon); the accumulator sums g^2, and g includes the decay."""

    config: AdagradConfig

    def dense_state(self, weight: Tensor) -> State:
        return fused_state(weight, sum=self.config.accumulator_start)

    def row_state(self, weight: Tensor, *, rowwise: bool) -> State:
        if rowwise:
            return {"accumulator": weight.new_full((len(weight),), self.config.accumulator_start)}
        if self.config.weight_decay > MOST_LAZY_DECAY:
            raise UserError(
                f"optim.weight_decay must be at most {MOST_LAZY_DECAY:g} for tables that are updated row by "
                f"row, because the decay of idle rows is approximate; got {self.config.weight_decay:g}. "
                "Try optim.embedding=dense, with an output layer that does not sample."
            )
        accumulator = torch.full_like(weight, self.config.accumulator_start)
        return {"accumulator": accumulator, **decay_state(weight, self.config.weight_decay)}

    def table_update(self, table: SparseTable, *, rowwise: bool) -> TableUpdate:
        kind = RowwiseAdagrad if rowwise else TableUpdate
        return kind(table, self, self.row_state(table.weight.detach(), rowwise=rowwise))

    def step_dense(
        self, weights: Sequence[Tensor], gradients: Sequence[Tensor], states: Sequence[State], *, divisor: Tensor
    ) -> None:
        sums, steps = ([state[key] for state in states] for key in ("sum", "step"))
        settings = {"weight_decay": self.config.weight_decay, "lr_decay": 0.0, "eps": EPSILON, "has_sparse_grad": False}
        fused_step(adagrad, weights, gradients, sums, steps, optimizer=self, divisor=divisor, **settings)

    def move(self, weight: Tensor, state: State, grad: Tensor) -> Tensor:
        if self.config.weight_decay:
            grad = grad.add_(weight, alpha=self.config.weight_decay)
        accumulator = state["accumulator"].addcmul(grad, grad)
        moved = weight.addcdiv(grad, accumulator.sqrt().add_(EPSILON), value=-self.lr)
        state["accumulator"] = torch.where(self.frozen, state["accumulator"], accumulator)
        return torch.where(self.frozen, weight, moved)

    @classmethod
    def pending_decay(cls, state: State, rows: Tensor | slice, idle_U: Tensor, config: Any) -> Tensor:
        """(1 - lr wd / sqrt(acc))^idle, computed via logarithms because the base is close to 1."""
        rate = config.lr * config.weight_decay
        return state["accumulator"][rows].rsqrt().mul_(-rate).log1p_().mul_(idle_U[:, None]).exp_()


class RowwiseAdagrad(TableUpdate):
    """One accumulator per word, summing the mean square of each occurrence's gradient; not clipped or decayed."""

    clipped = False

    def step(self, *, divisor: Tensor, scale: float) -> None:
        rows_U = self.rows_U
        old_U, old_UE = self.state["accumulator"][rows_U], self.table.weight[rows_U]
        if self.uses is None:  # rows were read once for all occurrences, and are averaged across ranks
            accumulator_U = old_U + self.grad_UE.square().mean(-1).mul_(scale**2)
        else:
            added_U = self.uses.sum(self.grad_NE.square().mean(-1, keepdim=True)).squeeze(1)
            # A rank's gradient is for the mean over its own tokens, so it is larger by the world size.
            ranks = self.optimizer.ranks
            accumulator_U = old_U + ranks.sum(added_U).mul_((scale / ranks.size) ** 2)
        step_size = self.optimizer.lr * scale
        weight_UE = old_UE.addcdiv(self.grad_UE, accumulator_U.sqrt().add_(EPSILON)[:, None], value=-step_size)
        self.table.weight[rows_U] = torch.where(self.optimizer.frozen, old_UE, weight_UE)
        self.state["accumulator"][rows_U] = torch.where(self.optimizer.frozen, old_U, accumulator_U)


@dataclass
class AdagradAdamConfig(AdagradConfig):
    """Adagrad with Adam for the core, and global-norm clipping."""

    name: str = "adagrad_adam"
    lr: Annotated[float, Range(above=0)] = 0.2
    schedule: Schedule = "linear"
    core_lr: Annotated[float, Range(above=0)] = 0.003
    """Adam's learning rate, for the core; warm-up and schedule apply to it as to `optim.lr`."""
    core_weight_decay: Annotated[float, Range(least=0)] = 0.0
    """Decoupled weight decay of the core: each step multiplies its weights by 1 - core_lr * core_weight_decay."""


@plugin("optim", "adagrad_adam", AdagradAdamConfig)
class AdagradAdam(Adagrad):
    """Adam's decay rates are 0.9 and 0.999."""

    config: AdagradAdamConfig

    def __init__(self, model: nn.Module, config: OptimConfig, *, ranks: Ranks | None = None) -> None:
        self.core = {id(p) for name, p in model.named_parameters() if name.startswith("core.")}
        super().__init__(model, config, ranks=ranks)

    def dense_state(self, weight: Tensor) -> State:
        return fused_state(weight, mean=0.0, square=0.0) if id(weight) in self.core else super().dense_state(weight)

    def step_dense(
        self, weights: Sequence[Tensor], gradients: Sequence[Tensor], states: Sequence[State], *, divisor: Tensor
    ) -> None:
        updates = list(zip(weights, gradients, states, strict=True))
        if others := [update for update in updates if id(update[0]) not in self.core]:
            super().step_dense(*zip(*others, strict=True), divisor=divisor)
        if core := [update for update in updates if id(update[0]) in self.core]:
            settings: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
            settings["lr"] = self.lr * self.config.core_lr / self.config.lr
            settings["weight_decay"] = self.config.core_weight_decay
            adam_step(*zip(*core, strict=True), optimizer=self, divisor=divisor, **settings)
