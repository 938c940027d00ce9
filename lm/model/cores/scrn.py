"""The structurally constrained recurrent network (section 3.2; Mikolov et al., 2014): slow units beside fast ones.

s_t = (1 - a) B x_t + a s_{t-1} drifts with the topic, h_t = sigmoid(P s_t + A x_t + R h_{t-1}) follows the words, and
the output layer sees both. As s does not depend on h, it is computed first, and h is a recurrent layer over [x_t, s_t].

Shapes: T steps, B streams, E width of the input, S slow units, H fast units.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Self

import torch
from torch import Tensor, nn

from lm.config.groups import ModelConfig
from lm.config.registry import plugin
from lm.config.rules import Count, Range
from lm.model.base import Core
from lm.model.dropout import DropoutMasks, drop
from lm.model.sigmoid import SigmoidRNN
from lm.system.arithmetic import recurrent_pass

State = tuple[Tensor, Tensor]
"""Slow units (1, B, S) and fast units (1, B, H)."""


@dataclass
class SCRNConfig(ModelConfig):
    """Fast units that forget and slow units that remember."""

    name: str = "scrn"
    context_size: Count = 40
    """Number of slow units, which the output layer sees beside the fast ones; the original has 40."""
    memory: Annotated[float, Range(least=0, below=1)] = 0.95
    """Share of a slow unit that is kept at each step."""

    @property
    def width(self) -> int:
        return self.hidden_size + self.context_size

    def resized(self, *, hidden_size: int, embedding_size: int) -> Self:
        context_size = min(self.context_size, hidden_size)
        return replace(self, hidden_size=hidden_size, embedding_size=embedding_size, context_size=context_size)


@plugin("model", "scrn", SCRNConfig)
class SCRN(Core):
    """One layer of slow and fast units, side by side in the output; no biases, as in the original."""

    def __init__(self, config: SCRNConfig) -> None:
        super().__init__()
        self.config, self.width = config, config.width
        self.context = nn.Linear(config.embedding_size, config.context_size, bias=False)
        self.fast = SigmoidRNN(config.embedding_size + config.context_size, config.hidden_size, bias=False)

    def forward(self, input_TBE: Tensor, state: State, masks: DropoutMasks | None) -> tuple[Tensor, State]:
        dropout = self.config.dropout
        input_TBE = drop(input_TBE, masks, dropout, place="embedding")
        slow_TBS = self._slow_units(self.context(input_TBE).to(state[0].dtype), state[0])
        with recurrent_pass(input_TBE.device):
            fast_TBH, after_1BH = self.fast(torch.cat([input_TBE, slow_TBS], dim=-1), state[1])
        hidden_TBD = torch.cat([fast_TBH, slow_TBS.to(fast_TBH.dtype)], dim=-1)
        after = slow_TBS[-1:], after_1BH.to(state[1].dtype)
        return drop(hidden_TBD, masks, dropout, place="hidden"), after

    def _slow_units(self, driven_TBS: Tensor, before_1BS: Tensor) -> Tensor:
        """The slow units after each step."""
        slow, keep = [], self.config.memory
        state_BS = before_1BS[0]
        for step_BS in (1 - keep) * driven_TBS:
            state_BS = torch.add(step_BS, state_BS, alpha=keep)
            slow.append(state_BS)
        return torch.stack(slow)

    def initial_state(self, num_streams: int, *, device: torch.device) -> State:
        sizes = self.config.context_size, self.config.hidden_size
        slow, fast = (torch.zeros(1, num_streams, size, device=device) for size in sizes)
        return slow, fast

    def activations(self, num_tokens: int, *, training: bool) -> int:
        units = 3 * (self.config.embedding_size + self.config.context_size) // 2 + self.width
        if training and self.config.dropout:
            units += 2 * (self.config.embedding_size + self.width)
        return num_tokens * units + sum(weight.numel() for weight in self.fast.parameters())
