"""The paper's core: dropout, a stack of LSTM layers, dropout (section 3.2).

Shapes: B streams, D width of the output, H cell width.
"""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lm.config.registry import plugin
from lm.model.stack import RecurrentStack, StackConfig

State = list[tuple[Tensor, Tensor]]
"""Per layer: output (1, B, D) and cell (1, B, H)."""


@dataclass
class LSTMConfig(StackConfig):
    """Long short-term memory, as in the paper."""

    name: str = "lstm"


@plugin("model", "lstm", LSTMConfig)
class LSTM(RecurrentStack):
    """LSTM layers, each optionally projected (LSTM-2048-512), dropout around each.

    Weights start in U(-0.1, 0.1), biases at 0 and the forget gate's at 1. Without biases an LSTM keeps its offsets in
    saturated cells, and an evaluation, which starts from zeros, may never reach them.
    """

    gates, units_per_input, units_per_cell = 4, 5, 14

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__(
            config,
            lambda width: nn.LSTM(width, config.hidden_size, proj_size=config.projection or 0),
            between=config.width,
        )
        # On a CPU every projected LSTM warns, once, that it takes another way than oneDNN's; nothing is to be done.
        warnings.filterwarnings("ignore", message="LSTM with projections is not supported with oneDNN")
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if "weight" in name:
                    parameter.uniform_(-0.1, 0.1)
                else:
                    parameter.zero_()
                if "bias_ih" in name:
                    parameter[config.hidden_size : 2 * config.hidden_size] = 1  # the gates are i, f, g, o

    def initial_state(self, num_streams: int, *, device: torch.device) -> State:
        return [
            (
                torch.zeros(1, num_streams, self.width, device=device),
                torch.zeros(1, num_streams, self.hidden_size, device=device),
            )
            for _ in self.layers
        ]
