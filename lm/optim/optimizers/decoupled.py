"""AdamW, RMSprop and SGD: moments and decoupled decay, w = (1 - lr wd) w - lr direction (Loshchilov and Hutter, 2019).

Each row of a table is treated as a separate parameter, trained in the steps that use it: its moments and their bias
correction ignore all other steps. While idle it only decays, lazily, by (1 - lr wd)^n over n steps; a step at a
fraction of the rate counts as that fraction of a step. If every step uses every row, that is the dense form; if the
rate changes, idle rows differ from it by terms of the order of (lr wd)^2.

Shapes: U distinct rows of a batch, V rows of the table, E width.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from lm.config.groups import EmbeddingUpdate, OptimConfig, Schedule
from lm.config.registry import plugin
from lm.config.rules import Range
from lm.optim.optimizer import DenseUpdate, FusedUpdate, LazyDecay, Optimizer, RowUpdate
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


@dataclass
class AdamConfig(DecoupledConfig):
    """AdamW with global-norm clipping."""

    name: str = "adam"
    lr: Annotated[float, Range(above=0)] = 0.004
    schedule: Schedule = Schedule.linear
    weight_decay: Annotated[float, Range(least=0)] = 0.01
    """Share of a weight, times the learning rate, that a step takes away; decoupled from the gradient."""
    beta1: Annotated[float, Range(least=0, below=1)] = 0.9
    """Decay rate of the first moment (running mean of gradients)."""
    beta2: Annotated[float, Range(least=0, below=1)] = 0.999
    """Decay rate of the second moment (running mean of squared gradients)."""
    epsilon: Annotated[float, Range(least=1e-30)] = 1e-8
    """Added to the root of the second moment."""


@plugin("optim", "adam", AdamConfig)
class Adam(DecoupledOptimizer):
    """direction = (mean / (1 - beta1^n)) / (sqrt(square / (1 - beta2^n)) + epsilon) in the nth step."""

    config: AdamConfig

    def dense_update(self, parameters: list[nn.Parameter]) -> DenseUpdate:
        return DenseAdam(parameters, config=self.config)

    def moments(self, weight: Tensor, *, by_word: bool) -> Moments:
        return {
            "steps": torch.zeros(len(weight), dtype=torch.int32, device=weight.device),
            "mean": torch.zeros_like(weight),
            "square": start_of_square(weight, by_word=by_word),
        }

    def direction(self, moments: Moments, grad: Tensor) -> Tensor:
        config, steps_U = self.config, moments["steps"].add_(1)
        mean_UE = moments["mean"].lerp_(grad, 1 - config.beta1)
        feed_square(moments["square"], grad, decay=config.beta2)
        root_UE = moments["square"] / _correction(config.beta2, steps_U)
        return (mean_UE / _correction(config.beta1, steps_U)).div_(root_UE.sqrt_().add_(config.epsilon))


def _correction(beta: float, steps_U: Tensor) -> Tensor:
    """1 - beta^steps as a column, exact where beta is next to 1."""
    return -torch.expm1(steps_U.double() * (math.log(beta) if beta else -math.inf)).float()[:, None]


class DenseAdam(FusedUpdate):
    """torch's AdamW on whole parameters."""

    def __init__(self, parameters: list[nn.Parameter], *, config: AdamConfig) -> None:
        super().__init__(parameters, start={"mean": 0.0, "square": 0.0})
        self.config = config

    def update(
        self, weights: list[Tensor], gradients: list[Tensor], state: dict[str, list[Tensor]], **options: Any
    ) -> None:
        config = self.config
        settings: dict[str, Any] = {"beta1": config.beta1, "beta2": config.beta2, "eps": config.epsilon}
        settings |= {"weight_decay": config.weight_decay, "decoupled_weight_decay": True, "amsgrad": False}
        adam(weights, gradients, state["mean"], state["square"], [], state["step"], **settings, **options)


@dataclass
class SGDConfig(DecoupledConfig):
    """Gradient descent with global-norm clipping."""

    name: str = "sgd"
    lr: Annotated[float, Range(above=0)] = 4.0
    schedule: Schedule = Schedule.linear
    momentum: Annotated[float, Range(least=0, below=1)] = 0.0
    """Decay of the velocity (a decaying sum of gradients); 0 for plain gradient descent."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.embedding is EmbeddingUpdate.rowwise:
            yield (
                "optim.embedding must be sparse or dense with optim=sgd, which has no second moments; got "
                "rowwise. Try optim.embedding=sparse"
            )


@plugin("optim", "sgd", SGDConfig)
class SGD(DecoupledOptimizer):
    """direction = velocity = momentum velocity + gradient."""

    config: SGDConfig

    def moments(self, weight: Tensor, *, by_word: bool) -> Moments:  # noqa: ARG002
        return {"velocity": torch.zeros_like(weight)} if self.config.momentum else {}

    def direction(self, moments: Moments, grad: Tensor) -> Tensor:
        if not self.config.momentum:
            return grad
        return moments["velocity"].mul_(self.config.momentum).add_(grad).clone()


@dataclass
class RMSpropConfig(DecoupledConfig):
    """RMSprop with global-norm clipping."""

    name: str = "rmsprop"
    lr: Annotated[float, Range(above=0)] = 0.006
    schedule: Schedule = Schedule.linear
    alpha: Annotated[float, Range(least=0, below=1)] = 0.99
    """Decay rate of the running mean of squared gradients."""
    epsilon: Annotated[float, Range(above=0)] = 1e-8
    """Added to the root of that mean."""


@plugin("optim", "rmsprop", RMSpropConfig)
class RMSprop(DecoupledOptimizer):
    """direction = gradient / (sqrt(square) + epsilon)."""

    config: RMSpropConfig

    def moments(self, weight: Tensor, *, by_word: bool) -> Moments:
        return {"square": start_of_square(weight, by_word=by_word)}

    def direction(self, moments: Moments, grad: Tensor) -> Tensor:
        feed_square(moments["square"], grad, decay=self.config.alpha)
        return grad / moments["square"].sqrt().add_(self.config.epsilon)
