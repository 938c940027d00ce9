"""Stochastic gradient descent, with momentum if asked for; decay is decoupled."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from lm.config.groups import EmbeddingUpdate, Schedule
from lm.config.registry import plugin
from lm.config.rules import Range
from lm.optim.decoupled import DecoupledConfig, DecoupledOptimizer, Moments


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
        if self.embedding_update is EmbeddingUpdate.rowwise:
            yield (
                "optim.embedding_update must be sparse or dense with optim=sgd, which has no second moments; got "
                "rowwise. Try optim.embedding_update=sparse"
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
