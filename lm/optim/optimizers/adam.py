"""AdamW: Adam with decoupled weight decay (Loshchilov and Hutter, 2019).

Word vectors are updated where a batch used them; see `lm.optim.decoupled` for what a row's moments are then.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from lm.config.groups import Schedule
from lm.config.registry import plugin
from lm.config.rules import Range
from lm.optim.decoupled import DecoupledConfig, DecoupledOptimizer, Moments, feed_square, start_of_square
from lm.optim.fused_update import FusedUpdate
from lm.optim.optimizer import DenseUpdate


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
        self, weights: list[Tensor], gradients: list[Tensor], state: dict[str, list[Tensor]], **how: Any
    ) -> None:
        config = self.config
        settings: dict[str, Any] = {"beta1": config.beta1, "beta2": config.beta2, "eps": config.epsilon}
        settings |= {"weight_decay": config.weight_decay, "decoupled_weight_decay": True, "amsgrad": False}
        adam(weights, gradients, state["mean"], state["square"], [], state["step"], **settings, **how)
