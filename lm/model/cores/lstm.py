"""The paper's core: dropout, a stack of LSTM layers, dropout (section 3.2).

Shapes: T steps, B streams, E width of the input, D width of the output, H cell width.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from lm.config.groups import ModelConfig
from lm.config.registry import plugin
from lm.config.rules import Count, OptionalCount
from lm.model.base import Core
from lm.model.dropout import DropoutMasks, drop
from lm.system.arithmetic import lstm_pass

UNITS_PER_INPUT, UNITS_PER_CELL, WEIGHT_COPIES = 5, 14, 1
"""Numbers that a layer holds per token for each of its inputs and cells, and copies it makes of its weights: counted on
real steps, good to about a fourth."""
State = list[tuple[Tensor, Tensor]]
"""Per layer: output (1, B, D) and cell (1, B, H)."""


@dataclass
class LSTMConfig(ModelConfig):
    """Long short-term memory, as in the paper."""

    layers: Count = 1
    projection: OptionalCount = None
    """Width of the LSTM's output where it is projected (LSTM-2048-512: 512); null for none."""

    @property
    def width(self) -> int:
        return self.projection or self.hidden_size

    def resized(self, *, hidden_size: int, embedding_size: int) -> Self:
        projection = self.projection if self.projection and self.projection < hidden_size else None
        return replace(self, hidden_size=hidden_size, embedding_size=embedding_size, projection=projection)

    def problems(self) -> Iterator[str]:
        if self.projection is not None and self.projection >= self.hidden_size:
            yield (
                f"model.projection must be below model.hidden_size ({self.hidden_size}); got {self.projection}. "
                "Try model.projection=null"
            )


@plugin("model", "lstm", LSTMConfig)
class LSTM(Core):
    """LSTM layers, each optionally projected (LSTM-2048-512), dropout around each.

    Weights start in U(-0.1, 0.1), biases at 0 and the forget gate's at 1. Without biases an LSTM keeps its offsets in
    saturated cells, and an evaluation, which starts from zeros, may never reach them.

    One `nn.LSTM` per layer instead of its own `num_layers`, because its dropout between layers would draw from
    torch's global generator and so depend on history.
    """

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.hidden_size = config.hidden_size
        self.width = config.width
        self.input_size = config.embedding_size
        widths = [config.embedding_size] + [self.width] * (config.layers - 1)
        self.layers = nn.ModuleList(
            nn.LSTM(width, config.hidden_size, proj_size=config.projection or 0) for width in widths
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

    @classmethod
    def build(cls, settings: LSTMConfig) -> "LSTM":
        return cls(settings)

    def forward(self, input_TBE: Tensor, state: State, masks: DropoutMasks | None) -> tuple[Tensor, State]:
        """The top layer's outputs (T, B, D) and the state after the last step."""
        new_state: State = []
        hidden = drop(input_TBE, masks, self.dropout, place="embedding")
        for number, (layer, layer_state) in enumerate(zip(self.layers, state, strict=True)):
            with lstm_pass(hidden.device):
                hidden, after = layer(hidden, layer_state)
            hidden = drop(hidden, masks, self.dropout, place=f"layer {number}")
            # As wide as it came: under autocast a CPU's LSTM hands out bfloat16, but what is carried on is float32.
            new_state.append((after[0].to(layer_state[0].dtype), after[1].to(layer_state[1].dtype)))
        return hidden, new_state

    def initial_state(self, num_streams: int, *, device: torch.device) -> State:
        return [
            (
                torch.zeros(1, num_streams, self.width, device=device),
                torch.zeros(1, num_streams, self.hidden_size, device=device),
            )
            for _ in self.layers
        ]

    def activations(self, num_tokens: int, *, training: bool) -> int:
        inputs = [self.input_size] + [self.width] * (len(self.layers) - 1)
        if not training:
            return num_tokens * (UNITS_PER_INPUT * max(inputs) + UNITS_PER_CELL * self.hidden_size)
        units = num_tokens * sum(UNITS_PER_INPUT * size + UNITS_PER_CELL * self.hidden_size for size in inputs)
        if self.dropout:
            units += num_tokens * 2 * (inputs[0] + self.width * len(inputs))
        weights = 4 * self.hidden_size * sum(size + self.width for size in inputs)
        return units + WEIGHT_COPIES * weights
