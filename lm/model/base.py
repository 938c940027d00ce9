"""The contracts of inputs and cores.

Shapes: T steps, B streams, U distinct words of a batch, E embedding width, D width of the hidden state.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from lm.model.dropout import DropoutMasks
from lm.model.state import State


class Input(nn.Module, ABC):
    """Words to vectors of `width` numbers."""

    width: int

    @classmethod
    @abstractmethod
    def build(cls, settings: Any, *, vocab_size: int, width: int, sparse: bool) -> "Input":
        """The input of these settings; with `sparse` a training step costs a batch's words, not the vocabulary."""

    @abstractmethod
    def forward(self, words: Tensor, distinct_U: Tensor | None = None, inverse: Tensor | None = None) -> Tensor:
        """Vectors of the words, (..., E).

        In training, `distinct_U` are the batch's distinct words and `inverse` the place of each word among them, both
        computed on the host.
        """


class Core(nn.Module, ABC):
    """Embedded words to hidden states of `width` numbers."""

    width: int

    @classmethod
    @abstractmethod
    def build(cls, settings: Any) -> "Core":
        """The core of these settings, freshly initialised."""

    @abstractmethod
    def forward(self, input_TBE: Tensor, state: State, masks: DropoutMasks | None) -> tuple[Tensor, State]:
        """Hidden states (T, B, D) and the state after the last step; `masks` is None outside training."""

    @abstractmethod
    def initial_state(self, num_streams: int, *, device: torch.device) -> State:
        """The state before the first word; streams are on dimension 1 of its tensors."""

    @abstractmethod
    def activations(self, num_tokens: int, *, training: bool) -> int:
        """Numbers held at once for `num_tokens` tokens, for the memory estimate."""
