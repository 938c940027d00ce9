"""RMSprop: gradients divided by the root of a running mean of their squares; decay is decoupled."""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from lm.config.groups import Schedule
from lm.config.registry import plugin
from lm.config.rules import Range
from lm.optim.decoupled import DecoupledConfig, DecoupledOptimizer, Moments, feed_square, start_of_square


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
