"""The IRNN (Le, Jaitly and Hinton, 2015; Table 2 has one of 4 layers): ReLUs that start by keeping what they hold.

h_t = max(0, A x_t + R h_{t-1} + b), with R = 1 and b = 0 at the start.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import nn

from lm.config.registry import plugin
from lm.config.rules import Range
from lm.model.stack import RecurrentStack, StackConfig, zero_biases


@dataclass
class IRNNConfig(StackConfig):
    """ReLU layers whose recurrent matrix starts at the identity."""

    name: str = "irnn"
    identity: Annotated[float, Range(above=0, most=1)] = 1.0
    """What the recurrent matrix starts at, times the identity; below 1 the layers forget."""


@plugin("model", "irnn", IRNNConfig)
class IRNN(RecurrentStack):
    """ReLU layers on torch's own kernel; the other weights start in U(+-1/sqrt(H))."""

    gates, units_per_input, units_per_cell = 1, 0.5, 1.5

    def __init__(self, config: IRNNConfig) -> None:
        def make(width: int) -> nn.RNN:
            return nn.RNN(width, config.hidden_size, nonlinearity="relu")

        super().__init__(config, make, between=config.hidden_size)
        zero_biases(self)
        with torch.no_grad():
            for layer in self.layers:
                nn.init.eye_(layer.get_parameter("weight_hh_l0")).mul_(config.identity)
