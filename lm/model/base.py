"""The contracts of inputs and cores.

Shapes: T steps, B streams, U distinct words of a batch, E embedding width, D width of the hidden state.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lm.data.plan import DistinctWords, Plan
from lm.data.text.vocabulary import Vocabulary
from lm.model.dropout import DropoutMasks
from lm.model.state import State
from lm.output.base import OutputLayer


class InputSizes(NamedTuple):
    """What an input is built for."""

    width: int
    """Of the vectors that the core gets."""
    vocabulary: Vocabulary
    output: OutputLayer
    """The model's output layer: its clusters and, where they are shared, its word vectors."""
    sparse: bool
    """Whether a training step costs a batch's words, not the vocabulary."""
    tied: bool = False
    """Whether to read the output layer's word vectors instead of having any."""


class Input(nn.Module, ABC):
    """Words to vectors of `width` numbers."""

    width: int

    @classmethod
    @abstractmethod
    def build(cls, settings: Any, sizes: InputSizes) -> "Input":
        """The input of these settings."""

    def rows_by_word(self) -> list[tuple[Tensor, list[int]]]:
        """Parameters that have a row per word, and the words of their rows, as in `OutputLayer`."""
        return []

    def plan(self, distinct_U: Tensor) -> Plan:  # noqa: ARG002
        """Whatever must be counted about a batch's distinct words, in increasing order; made on the host."""
        return Plan()

    @abstractmethod
    def forward(self, words: Tensor, distinct: DistinctWords | None = None) -> Tensor:
        """Vectors of the words, (..., E); in training, `distinct` is what the host knows of the batch's words."""

    def ids_of_unseen(self, words: Sequence[str]) -> list[int] | None:  # noqa: ARG002
        """Ids by which an evaluation gives words outside the vocabulary to `forward`; None if they have no vectors."""
        return None

    def activations(self, num_tokens: int, *, num_distinct: int) -> int:  # noqa: ARG002
        """Numbers held at once in a training step of so many tokens and distinct words, for the memory estimate."""
        return 2 * num_tokens * self.width


class Core(nn.Module, ABC):
    """Embedded words to hidden states of `width` numbers; made of its settings alone."""

    width: int

    @abstractmethod
    def forward(self, input_TBE: Tensor, state: State, masks: DropoutMasks | None) -> tuple[Tensor, State]:
        """Hidden states (T, B, D) and the state after the last step; `masks` is None outside training."""

    @abstractmethod
    def initial_state(self, num_streams: int, *, device: torch.device) -> State:
        """The state before the first word; streams are on dimension 1 of its tensors."""

    @abstractmethod
    def activations(self, num_tokens: int, *, training: bool) -> int:
        """Numbers held at once for `num_tokens` tokens, for the memory estimate."""
