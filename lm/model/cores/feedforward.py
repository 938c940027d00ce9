"""The feed-forward network (section 3.1; Bengio et al., 2003): predicts the next word from a window of N words.

h_t = f(A [x_{t-N+1} ... x_t] + b). The state holds the embedded words before the batch, so streams, resuming and
generation work as with any other core.

Shapes: T steps, B streams, E input width, N words in the window, D output width.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from lm.config.groups import Width, plugin
from lm.model.base import Core
from lm.model.cores.recurrent import StackConfig, zero_biases
from lm.model.regularization import DropoutMasks, drop


@dataclass
class FeedforwardConfig(StackConfig):
    """Feed-forward network over a window of words."""

    name: str = "feedforward"
    window: Width = 5
    """Number of previous words used to predict the next one."""
    nonlinearity: Literal["tanh", "sigmoid", "relu"] = "tanh"
    """`tanh`, `relu`, or the paper's `sigmoid`."""


@plugin("model", "feedforward", FeedforwardConfig)
class Feedforward(Core):
    """Feed-forward layers over a zero-padded window; weights start in U(+-1/sqrt(fan_in)), biases at 0."""

    def __init__(self, config: FeedforwardConfig) -> None:
        super().__init__()
        self.config, self.width = config, config.width
        widths = [config.window * config.embedding_size] + [config.hidden_size] * (config.layers - 1)
        self.layers = nn.ModuleList(nn.Linear(width, config.hidden_size) for width in widths)
        self.projection = nn.Linear(config.hidden_size, self.width, bias=False) if config.projection else None
        self.activation = getattr(torch, config.nonlinearity)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                bound = module.in_features**-0.5
                nn.init.uniform_(module.weight, -bound, bound)
        zero_biases(self)

    def forward(self, input_TBE: Tensor, state: Tensor, masks: DropoutMasks | None) -> tuple[Tensor, Tensor]:
        steps = len(input_TBE)
        words_TBE = torch.cat([state, input_TBE])
        windows = [words_TBE[first : first + steps] for first in range(self.config.window)]
        hidden = torch.cat(windows, dim=-1)
        for index, layer in enumerate(self.layers):
            if index > 0:
                hidden = drop(hidden, masks, self.config.dropout, layer=f"layer {index - 1}")
            hidden = self.activation(layer(hidden))
        return hidden if self.projection is None else self.projection(hidden), words_TBE[steps:]

    def initial_state(self, num_streams: int, *, device: torch.device) -> Tensor:
        return torch.zeros(self.config.window - 1, num_streams, self.config.embedding_size, device=device)
