"""The feed-forward network (section 3.1; Bengio et al., 2003): the next word from a window of the last N words.

h_t = f(A [x_{t-N+1} ... x_t] + b). The state is the embedded words before the batch, so streams, resume and generation
work as with any other core.

Shapes: T steps, B streams, E width of the input, N words of the window, D width of the output.
"""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from lm.config.registry import plugin
from lm.config.rules import Count
from lm.model.base import Core, DropoutMasks, drop
from lm.model.cores.recurrent import StackConfig, zero_biases


class Nonlinearity(Enum):
    """f of the feed-forward network: functions of torch."""

    tanh = "tanh"
    sigmoid = "sigmoid"
    relu = "relu"


@dataclass
class FeedforwardConfig(StackConfig):
    """A window of words through layers of units."""

    name: str = "feedforward"
    window: Count = 5
    """Number of words that the next one is predicted from."""
    nonlinearity: Nonlinearity = Nonlinearity.tanh
    """`tanh`, `relu`, or the paper's `sigmoid`."""


@plugin("model", "feedforward", FeedforwardConfig)
class Feedforward(Core):
    """Layers over the window, which starts with zeros; weights start in U(+-1/sqrt(fan in)), biases at 0."""

    def __init__(self, config: FeedforwardConfig) -> None:
        super().__init__()
        self.config, self.width = config, config.width
        widths = [config.window * config.embedding_size] + [config.hidden_size] * (config.layers - 1)
        self.layers = nn.ModuleList(nn.Linear(width, config.hidden_size) for width in widths)
        self.projection = nn.Linear(config.hidden_size, self.width, bias=False) if config.projection else None
        self.activation = getattr(torch, config.nonlinearity.value)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                bound = module.in_features**-0.5
                nn.init.uniform_(module.weight, -bound, bound)
        zero_biases(self)

    def forward(self, input_TBE: Tensor, state: Tensor, masks: DropoutMasks | None) -> tuple[Tensor, Tensor]:
        dropout, steps = self.config.dropout, len(input_TBE)
        words_TBE = torch.cat([state, drop(input_TBE, masks, dropout, layer="embedding")])
        windows = [words_TBE[first : first + steps] for first in range(self.config.window)]
        hidden = torch.cat(windows, dim=-1)
        for index, layer in enumerate(self.layers):
            hidden = drop(self.activation(layer(hidden)), masks, dropout, layer=f"layer {index}")
        return hidden if self.projection is None else self.projection(hidden), words_TBE[steps:]

    def initial_state(self, num_streams: int, *, device: torch.device) -> Tensor:
        return torch.zeros(self.config.window - 1, num_streams, self.config.embedding_size, device=device)
