"""AdamW: Adam with decoupled weight decay (Loshchilov and Hutter, 2019).

Word vectors are updated where a batch used them; see `lm.optim.decoupled` for what a row's moments are then.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from lm.config.registry import plugin
from lm.config.rules import Range
from lm.optim.decoupled import DecoupledConfig, DecoupledOptimizer, Moments, feed_square, start_of_square
from lm.optim.optimizer import DenseUpdate


@dataclass
class AdamConfig(DecoupledConfig):
    """AdamW with global-norm clipping."""

    weight_decay: Annotated[float, Range(least=0)] = 0.01
    """Share of a weight, times the learning rate, that a step takes away; decoupled from the gradient."""
    beta1: Annotated[float, Range(least=0, below=1)] = 0.9
    """What of the first moment, the running mean of gradients, a step keeps."""
    beta2: Annotated[float, Range(least=0, below=1)] = 0.999
    """What of the second moment, the running mean of squared gradients, a step keeps."""
    epsilon: Annotated[float, Range(above=0)] = 1e-8
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


class DenseAdam(DenseUpdate):
    """torch's AdamW on whole parameters, by its function, as in `adagrad.py`."""

    def __init__(self, parameters: list[nn.Parameter], *, config: AdamConfig) -> None:
        super().__init__(parameters)
        self.config = config
        self.fused = parameters[0].device.type != "meta"
        self.state = {
            number: {
                "step": torch.zeros((), device=parameter.device if self.fused else "cpu"),
                "mean": torch.zeros_like(parameter, requires_grad=False),
                "square": torch.zeros_like(parameter, requires_grad=False),
            }
            for number, parameter in enumerate(parameters)
        }

    def step(self, *, lr: float, divisor: Tensor, frozen: Tensor) -> None:
        used = [number for number, parameter in enumerate(self.parameters) if parameter.grad is not None]
        gradients = self.gradients()
        if not self.fused:
            torch._foreach_div_(gradients, divisor)
        adam(
            [self.parameters[number] for number in used],
            gradients,
            [self.state[number]["mean"] for number in used],
            [self.state[number]["square"] for number in used],
            [],
            [self.state[number]["step"] for number in used],
            fused=self.fused,
            foreach=not self.fused,
            grad_scale=divisor.float() if self.fused else None,
            found_inf=frozen.float() if self.fused else None,
            decoupled_weight_decay=True,
            amsgrad=False,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            lr=lr,
            weight_decay=self.config.weight_decay,
            eps=self.config.epsilon,
            maximize=False,
        )
        for parameter in self.parameters:
            parameter.grad = None
