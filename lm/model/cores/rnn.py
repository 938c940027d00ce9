"""The Elman network (section 3.2): h_t = f(A x_t + R h_{t-1} + b), on torch's own kernels."""

from dataclasses import dataclass
from enum import Enum

from torch import nn

from lm.config.registry import plugin
from lm.model.sigmoid import SigmoidRNN
from lm.model.stack import RecurrentStack, StackConfig, zero_biases


class Nonlinearity(Enum):
    """f of the Elman network."""

    tanh = "tanh"
    sigmoid = "sigmoid"


@dataclass
class RNNConfig(StackConfig):
    """The Elman network."""

    name: str = "rnn"
    nonlinearity: Nonlinearity = Nonlinearity.sigmoid
    """The paper's `sigmoid`, or `tanh`, which saturates at the paper's learning rate (try optim.lr=0.03)."""


@plugin("model", "rnn", RNNConfig)
class RNN(RecurrentStack):
    """Elman layers; weights start as torch's do, in U(+-1/sqrt(H)), biases at 0."""

    gates, units_per_input, units_per_cell = 1, 0.5, 1.5

    def __init__(self, config: RNNConfig) -> None:
        kind = SigmoidRNN if config.nonlinearity is Nonlinearity.sigmoid else nn.RNN
        super().__init__(config, lambda width: kind(width, config.hidden_size), between=config.hidden_size)
        zero_biases(self)
