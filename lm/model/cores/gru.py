"""Gated recurrent units (section 3.2; Chung et al., 2014), on torch's own kernels."""

from dataclasses import dataclass

from torch import nn

from lm.config.registry import plugin
from lm.model.stack import RecurrentStack, StackConfig, zero_biases


@dataclass
class GRUConfig(StackConfig):
    """Gated recurrent units: three quarters of an LSTM's weights, and no cell beside the output."""

    name: str = "gru"


@plugin("model", "gru", GRUConfig)
class GRU(RecurrentStack):
    """GRU layers; weights start as torch's do, in U(+-1/sqrt(H)), biases at 0."""

    gates, units_per_input, units_per_cell = 3, 1, 6.5

    def __init__(self, config: GRUConfig) -> None:
        super().__init__(config, lambda width: nn.GRU(width, config.hidden_size), between=config.hidden_size)
        zero_biases(self)
