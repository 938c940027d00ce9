"""A Transformer with memory (Dai et al., 2019): pre-norm blocks with rotary positions (Su et al., 2021).

In every layer, a position attends to itself and to the `memory` positions before it. The state holds each layer's
inputs at the last `memory` positions, without gradients, so reading a text in segments of any length gives the hidden
states of one pass over the whole text. A word's hidden state depends on up to `layers` x `memory` words before it.

Together with `input=adaptive output=adaptive model.tie=true` this is the model of Baevski and Auli (2019), except for
its sinusoidal positions and its dropout inside attention and feed-forward layers.

Shapes: T steps, B streams, E input width, D output width, M memory, S = M + T positions to attend to, H heads, W width
of a head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.config.groups import ModelConfig, Range, Width, plugin
from lm.model.base import Core, State
from lm.model.regularization import DropoutMasks, drop


@dataclass
class TransformerConfig(ModelConfig):
    """Self-attention over the most recent words."""

    name: str = "transformer"
    layers: Annotated[int, Range(least=1, most=1000)] = 2
    """Number of blocks; each attends, then applies a feed-forward layer four times as wide."""
    heads: Width = 8
    """Attention heads; twice their number must divide `hidden_size`."""
    memory: Annotated[int, Range(least=1, most=1e9)] = 64
    """Number of previous positions that each layer attends to, also across batches."""

    def problems(self) -> Iterator[str]:
        if self.hidden_size % (2 * self.heads):
            multiple = max(1, round(self.hidden_size / (2 * self.heads))) * 2 * self.heads
            yield (
                f"model.hidden_size must be a multiple of 2 x model.heads ({2 * self.heads}); got {self.hidden_size}. "
                f"Try model.hidden_size={multiple}."
            )


class Positions(NamedTuple):
    """Visible positions and rotations, shared by the attention of all layers."""

    visible_B1TS: Tensor
    """Whether a query may attend to a position."""
    cos_S11W: Tensor
    sin_S11W: Tensor
    """Rotations of queries and keys; the sine has opposite signs in the two halves of a head."""

    @classmethod
    def after(cls, read_1B: Tensor, *, steps: int, memory: int, head_width: int) -> "Positions":
        """Return the positions of T steps; `read_1B` is the number of words in each stream's memory."""
        device = read_1B.device
        key_S = torch.arange(memory + steps, device=device)
        age_TS = memory + torch.arange(steps, device=device)[:, None] - key_S
        read_BS = key_S >= memory - read_1B.t()
        visible_BTS = (age_TS >= 0) & (age_TS <= memory) & read_BS[:, None]
        frequency_W = 10_000 ** (-torch.arange(0, head_width, 2, device=device) / head_width).repeat(2)
        angle_S11W = (key_S[:, None] * frequency_W)[:, None, None]
        sign_W = 1 - 2 * (torch.arange(head_width, device=device) < head_width // 2).float()
        return cls(visible_BTS[:, None], angle_S11W.cos(), sign_W * angle_S11W.sin())

    def rotate(self, x_SBHW: Tensor) -> Tensor:
        """Rotate the last positions, so that dot products depend only on the distance between positions."""
        steps, half = len(x_SBHW), x_SBHW.size(-1) // 2
        return x_SBHW * self.cos_S11W[-steps:] + x_SBHW.roll(half, -1) * self.sin_S11W[-steps:]


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to its input; weights start in U(+-1/sqrt(fan_in))."""

    def __init__(self, config: TransformerConfig, index: int) -> None:
        super().__init__()
        width = config.width
        self.heads, self.dropout, self.index = config.heads, config.dropout, index
        self.norm, self.feedforward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.attended = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.wide, self.narrow = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(
        self, hidden_TBD: Tensor, memory_MBD: Tensor, positions: Positions, masks: DropoutMasks | None
    ) -> Tensor:
        attended_TBD = self._attend(hidden_TBD, memory_MBD, positions)
        hidden_TBD = hidden_TBD + drop(attended_TBD, masks, self.dropout, layer=f"attention {self.index}")
        change_TBD = self.narrow(self.wide(self.feedforward_norm(hidden_TBD)).relu())
        return hidden_TBD + drop(change_TBD, masks, self.dropout, layer=f"layer {self.index}")

    def _attend(self, hidden_TBD: Tensor, memory_MBD: Tensor, positions: Positions) -> Tensor:
        context_SBD = self.norm(torch.cat([memory_MBD, hidden_TBD]))
        query, (key, value) = self.query(context_SBD[len(memory_MBD) :]), self.key_value(context_SBD).chunk(2, -1)
        query, key, value = (x.unflatten(-1, (self.heads, -1)) for x in (query, key, value))
        query, key = (positions.rotate(x).to(value.dtype) for x in (query, key))
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        mixed_BHTW = F.scaled_dot_product_attention(query, key, value, attn_mask=positions.visible_B1TS)
        attended_TBD: Tensor = self.attended(mixed_BHTW.permute(2, 0, 1, 3).flatten(-2))
        return attended_TBD


@plugin("model", "transformer", TransformerConfig)
class Transformer(Core):
    """Pre-norm blocks and a final norm; dropout on the output of each half of a block."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config, self.width, self.looks_back = config, config.width, config.memory
        widths = config.embedding_size, config.hidden_size
        self.input = nn.Identity() if widths[0] == widths[1] else nn.Linear(*widths, bias=False)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.layers))
        self.norm = nn.LayerNorm(self.width)

    def forward(self, input_TBE: Tensor, state: State, masks: DropoutMasks | None) -> tuple[Tensor, State]:
        memory, steps, head_width = self.config.memory, len(input_TBE), self.width // self.config.heads
        positions = Positions.after(state["read"], steps=steps, memory=memory, head_width=head_width)
        hidden_TBD, memories = self.input(input_TBE), []
        for block, memory_MBD in zip(self.blocks, state["memories"], strict=True):
            hidden_TBD = hidden_TBD.to(memory_MBD.dtype)  # under autocast, sums and memories stay float32
            memories.append(torch.cat([memory_MBD[steps:], hidden_TBD[-memory:].detach()]))
            hidden_TBD = block(hidden_TBD, memory_MBD, positions, masks)
        return self.norm(hidden_TBD), {"memories": memories, "read": (state["read"] + steps).clamp(max=memory)}

    def initial_state(self, num_streams: int, *, device: torch.device) -> State:
        """Layer inputs (M, B, D) per layer, most recent last, and the number of them that are words, (1, B)."""
        sizes = self.config.memory, num_streams, self.width
        memories = [torch.zeros(sizes, device=device) for _ in self.blocks]
        return {"memories": memories, "read": torch.zeros(1, num_streams, device=device)}
