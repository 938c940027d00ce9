"""The recurrent core: dropout, a stack of LSTM layers, dropout (section 3.2 of the paper).

Shapes: T steps, B streams, E width of the input, D width of the output, H cell width.
"""

import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lm.config.model import ModelConfig
from lm.system.arithmetic import lstm_pass
from lm.system.randomness import generator_for

State = list[tuple[Tensor, Tensor]]
"""Per layer: output (1, B, D) and cell (1, B, H)."""


@dataclass(frozen=True)
class DropoutMasks:
    """Where dropout takes its masks from in a training step; evaluation passes None instead."""

    seed: int
    step: int
    num_streams: int
    """Of the whole batch, over all ranks: masks are drawn for all of them."""
    streams: slice
    """Those that are computed."""

    @classmethod
    def of_batch(cls, seed: int, step: int, num_streams: int) -> "DropoutMasks":
        """For a batch that one process computes whole."""
        return cls(seed, step, num_streams, slice(0, num_streams))

    def of(self, streams: slice) -> "DropoutMasks":
        """What some of the computed streams get of the masks."""
        first = self.streams.start
        return replace(self, streams=slice(first + streams.start, first + streams.stop))

    def keep(self, x_TBE: Tensor, probability: float, *, purpose: str) -> Tensor:
        """A mask for the computed streams: 1 with this probability, else 0."""
        steps, _, width = x_TBE.shape
        generator = generator_for(self.seed, purpose, self.step, device=x_TBE.device)
        mask_TBE = x_TBE.new_empty(steps, self.num_streams, width).bernoulli_(probability, generator=generator)
        if self.streams == slice(0, self.num_streams):
            return mask_TBE
        return mask_TBE[:, self.streams].contiguous()  # a copy, so that the other streams' can be let go


class LSTM(nn.Module):
    """LSTM layers, each optionally projected (LSTM-2048-512), dropout around each.

    Weights start in U(-0.1, 0.1), biases at 0 and the forget gate's at 1. Without biases an LSTM keeps its offsets in
    saturated cells, and an evaluation, which starts from zeros, may never reach them.

    One `nn.LSTM` per layer instead of its own `num_layers`, because its dropout between layers would draw from
    torch's global generator and so depend on history.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.hidden_size = config.hidden_size
        self.width = config.projection or config.hidden_size
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

    def forward(self, input_TBE: Tensor, state: State, noise: DropoutMasks | None) -> tuple[Tensor, State]:
        """The top layer's outputs (T, B, D) and the state after the last step."""
        new_state: State = []
        hidden = self._drop(input_TBE, noise, "embedding")
        for number, (layer, layer_state) in enumerate(zip(self.layers, state, strict=True)):
            with lstm_pass(hidden.device):
                hidden, after = layer(hidden, layer_state)
            hidden = self._drop(hidden, noise, f"layer {number}")
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

    def _drop(self, x_TBE: Tensor, noise: DropoutMasks | None, place: str) -> Tensor:
        if noise is None or self.dropout == 0:
            return x_TBE
        keep = 1 - self.dropout
        return x_TBE * noise.keep(x_TBE, keep, purpose=f"dropout {place}").div_(keep)
