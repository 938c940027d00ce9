"""A stack of recurrent layers with dropout around each: what the LSTM, the GRU and the Elman networks share.

Shapes: T steps, B streams, E width of the input, D width of the output, H cell width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Self

import torch
from torch import Tensor, nn

from lm.config.groups import ModelConfig
from lm.config.rules import Range
from lm.model.base import Core
from lm.model.dropout import DropoutMasks, drop
from lm.model.state import State, map_state
from lm.system.arithmetic import recurrent_pass


@dataclass
class StackConfig(ModelConfig):
    """Layers of recurrent cells."""

    layers: Annotated[int, Range(least=1, most=1000)] = 1
    """Layers, each reading the one below it."""
    projection: Annotated[int | None, Range(least=1, most=1e9)] = None
    """Width of the core's output where it is projected (LSTM-2048-512: 512); null for none."""

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


class RecurrentStack(Core):
    """Layers that each turn (inputs, state) into (outputs, state), as torch's recurrent modules do.

    One module per layer instead of torch's `num_layers`, because its dropout between layers would draw from torch's
    global generator and so depend on history.
    """

    gates: int
    """Blocks of H rows in a layer's weights."""
    units_per_input: float
    units_per_cell: float
    """Numbers that a layer holds per token for each of its inputs and cells: counted on real steps, good to about a
    fourth."""

    def __init__(self, config: StackConfig, make_layer: Callable[[int], nn.Module], *, between: int) -> None:
        """`make_layer` makes the layer over inputs of a width; `between` is the width of a layer's output."""
        super().__init__()
        self.dropout = config.dropout
        self.hidden_size = config.hidden_size
        self.width = config.width
        self.input_size = config.embedding_size
        self.between = between
        widths = [config.embedding_size] + [between] * (config.layers - 1)
        self.layers = nn.ModuleList(make_layer(width) for width in widths)
        # Where the layers do not project their own output, the top one's is projected.
        self.projection = None if between == self.width else nn.Linear(between, self.width, bias=False)

    def forward(self, input_TBE: Tensor, state: State, masks: DropoutMasks | None) -> tuple[Tensor, State]:
        """The top layer's outputs (T, B, D) and the state after the last step."""
        new_state = []
        hidden = drop(input_TBE, masks, self.dropout, place="embedding")
        for number, (layer, before) in enumerate(zip(self.layers, state, strict=True)):
            with recurrent_pass(hidden.device):
                hidden, after = layer(hidden, before)
            hidden = drop(hidden, masks, self.dropout, place=f"layer {number}")
            # As wide as it came: under autocast some CPU kernels hand out bfloat16, but what is carried on is float32.
            new_state.append(map_state(lambda new, old: new.to(old.dtype), after, before))
        return hidden if self.projection is None else self.projection(hidden), new_state

    def initial_state(self, num_streams: int, *, device: torch.device) -> State:
        return [torch.zeros(1, num_streams, self.hidden_size, device=device) for _ in self.layers]

    def activations(self, num_tokens: int, *, training: bool) -> int:
        inputs = [self.input_size] + [self.between] * (len(self.layers) - 1)
        cells = self.units_per_cell * self.hidden_size
        if not training:
            return int(num_tokens * (self.units_per_input * max(inputs) + cells))
        units = num_tokens * sum(self.units_per_input * size + cells for size in inputs)
        if self.dropout:
            units += num_tokens * 2 * (inputs[0] + self.between * len(inputs))
        # A layer makes a copy of its weights.
        return int(units) + self.gates * self.hidden_size * sum(size + self.between for size in inputs)


@torch.no_grad()
def zero_biases(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if "bias" in name:
            parameter.zero_()
