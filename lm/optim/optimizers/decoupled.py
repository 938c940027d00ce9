"""AdamW, RMSprop and SGD: moments and decoupled decay, w = (1 - lr wd) w - lr direction (Loshchilov and Hutter, 2019).

Each table row is treated as a separate parameter that is trained only in steps that use it: its moments and their bias
correction ignore all other steps. An idle row only decays, lazily, by (1 - lr wd)^n over n steps; a step at a fraction
of the rate counts as that fraction of a step. If every step uses every row, this equals the dense version. If the rate
changes, idle rows differ from it by terms of order (lr wd)^2.

Shapes: U distinct rows in a batch, V rows in the table, E width.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from lm.config.groups import OptimConfig, Range, Schedule, plugin
from lm.optim.optimizer import Optimizer, State, decay_state, fused_state, fused_step


@dataclass
class DecoupledConfig(OptimConfig):
    """Settings shared by AdamW, RMSprop and SGD."""

    weight_decay: Annotated[float, Range(least=0)] = 0.0
    """Decoupled weight decay: each step multiplies weights by 1 - lr * weight_decay."""

    def problems(self) -> Iterator[str]:
        if self.lr * self.weight_decay >= 1:
            yield (
                "optim.lr times optim.weight_decay must be below 1, or decay would flip the signs of weights; got "
                f"optim.lr={self.lr:g} and optim.weight_decay={self.weight_decay:g}. "
                f"Try optim.weight_decay={0.01 / self.lr:.1g}"
            )


class DecoupledOptimizer(Optimizer):
    """Base class with decoupled decay; subclasses define the moments and the update direction."""

    config: DecoupledConfig

    @abstractmethod
    def moments(self, weight: Tensor, *, rowwise: bool) -> State:
        """Initial moments; `rowwise` requests one second moment per row."""

    @abstractmethod
    def direction(self, moments: State, grad: Tensor) -> Tensor:
        """Return the update at rate 1 as a new tensor; moments are updated in place."""

    def dense_state(self, weight: Tensor) -> State:
        return self.moments(weight, rowwise=False)

    def row_state(self, weight: Tensor, *, rowwise: bool) -> State:
        return {**decay_state(weight, self.config.weight_decay), **self.moments(weight, rowwise=rowwise)}

    def move(self, weight: Tensor, state: State, grad: Tensor) -> Tensor:
        rate = self.lr * ~self.frozen
        direction = self.direction(state, torch.where(self.frozen, 0, grad))
        if self.config.weight_decay:
            weight.mul_(1 - rate * self.config.weight_decay)
        return weight.sub_(direction.mul_(rate))

    @classmethod
    def pending_decay(cls, state: State, rows: Tensor | slice, idle_U: Tensor, config: Any) -> Tensor:
        """(1 - lr wd)^idle, computed via logarithms because the base is close to 1."""
        return idle_U.mul(math.log1p(-config.lr * config.weight_decay)).exp_()[:, None]


def adam_step(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[State],
    *,
    optimizer: Optimizer,
    **settings: Any,
) -> None:
    """AdamW's update by torch's fused kernel, for weights whose state has a mean, a square and a step."""
    means, squares, steps = ([state[key] for state in states] for key in ("mean", "square", "step"))
    settings |= {"decoupled_weight_decay": True, "amsgrad": False}
    fused_step(adam, weights, gradients, means, squares, [], steps, optimizer=optimizer, **settings)


def feed_square(square: Tensor, grad: Tensor, *, decay: float) -> None:
    """Update a running mean of squared gradients, per element or per row."""
    if square.shape == grad.shape:
        square.mul_(decay).addcmul_(grad, grad, value=1 - decay)
    else:
        square.mul_(decay).add_(grad.square().mean(-1, keepdim=True), alpha=1 - decay)


@dataclass
class AdamConfig(DecoupledConfig):
    """AdamW with global-norm clipping."""

    name: str = "adam"
    lr: Annotated[float, Range(above=0)] = 0.004
    schedule: Schedule = "linear"
    weight_decay: Annotated[float, Range(least=0)] = 0.01
    """Decoupled weight decay: each step multiplies weights by 1 - lr * weight_decay."""
    beta1: Annotated[float, Range(least=0, below=1)] = 0.9
    """Decay rate of the first moment (running mean of gradients)."""
    beta2: Annotated[float, Range(least=0, below=1)] = 0.999
    """Decay rate of the second moment (running mean of squared gradients)."""
    epsilon: Annotated[float, Range(least=1e-30)] = 1e-8
    """Added to the square root of the second moment."""


@plugin("optim", "adam", AdamConfig)
class Adam(DecoupledOptimizer):
    """direction = (mean / (1 - beta1^n)) / (sqrt(square / (1 - beta2^n)) + epsilon) at step n."""

    config: AdamConfig

    def dense_state(self, weight: Tensor) -> State:
        return fused_state(weight, mean=0.0, square=0.0)

    def step_dense(
        self, weights: Sequence[Tensor], gradients: Sequence[Tensor], states: Sequence[State], *, divisor: Tensor
    ) -> None:
        config = self.config
        settings = {"beta1": config.beta1, "beta2": config.beta2, "eps": config.epsilon}
        settings |= {"lr": self.lr, "weight_decay": config.weight_decay}
        adam_step(weights, gradients, states, optimizer=self, divisor=divisor, **settings)

    def moments(self, weight: Tensor, *, rowwise: bool) -> State:
        return {
            "steps": torch.zeros(len(weight), dtype=torch.int32, device=weight.device),
            "mean": torch.zeros_like(weight),
            "square": torch.zeros_like(weight[:, :1] if rowwise else weight),
        }

    def direction(self, moments: State, grad: Tensor) -> Tensor:
        config, steps_U = self.config, moments["steps"].add_(1)
        mean_UE = moments["mean"].lerp_(grad, 1 - config.beta1)
        feed_square(moments["square"], grad, decay=config.beta2)
        root_UE = moments["square"] / _correction(config.beta2, steps_U)
        return (mean_UE / _correction(config.beta1, steps_U)).div_(root_UE.sqrt_().add_(config.epsilon))


def _correction(beta: float, steps_U: Tensor) -> Tensor:
    """1 - beta^steps as a column, accurate even if beta is close to 1."""
    return -torch.expm1(steps_U.double() * (math.log(beta) if beta else -math.inf)).float()[:, None]


@dataclass
class SGDConfig(DecoupledConfig):
    """Gradient descent with global-norm clipping."""

    name: str = "sgd"
    lr: Annotated[float, Range(above=0)] = 4.0
    schedule: Schedule = "linear"
    momentum: Annotated[float, Range(least=0, below=1)] = 0.0
    """Decay of the velocity (a decaying sum of gradients); 0 for plain gradient descent."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.embedding == "rowwise":
            yield (
                "optim.embedding must be sparse or dense with optim=sgd, which has no second moments; got "
                "rowwise. Try optim.embedding=sparse."
            )


@plugin("optim", "sgd", SGDConfig)
class SGD(DecoupledOptimizer):
    """direction = velocity = momentum velocity + gradient."""

    config: SGDConfig

    def moments(self, weight: Tensor, *, rowwise: bool) -> State:
        return {"velocity": torch.zeros_like(weight)} if self.config.momentum else {}

    def direction(self, moments: State, grad: Tensor) -> Tensor:
        if not self.config.momentum:
            return grad
        return moments["velocity"].mul_(self.config.momentum).add_(grad).clone()


@dataclass
class RMSpropConfig(DecoupledConfig):
    """RMSprop with global-norm clipping."""

    name: str = "rmsprop"
    lr: Annotated[float, Range(above=0)] = 0.006
    schedule: Schedule = "linear"
    alpha: Annotated[float, Range(least=0, below=1)] = 0.99
    """Decay rate of the running mean of squared gradients."""
    epsilon: Annotated[float, Range(above=0)] = 1e-8
    """Added to the square root of the running mean."""


@plugin("optim", "rmsprop", RMSpropConfig)
class RMSprop(DecoupledOptimizer):
    """direction = gradient / (sqrt(square) + epsilon)."""

    config: RMSpropConfig

    def moments(self, weight: Tensor, *, rowwise: bool) -> State:
        return {"square": torch.zeros_like(weight[:, :1] if rowwise else weight)}

    def direction(self, moments: State, grad: Tensor) -> Tensor:
        feed_square(moments["square"], grad, decay=self.config.alpha)
        return grad / moments["square"].sqrt().add_(self.config.epsilon)
