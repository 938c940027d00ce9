"""Interfaces of inputs and cores, and the state a core carries from step to step.

A state is any tree of lists, tuples and dicts of tensors, with the streams on dimension 1 of every tensor. Only the
core that made a state reads its contents; all other code uses the functions here.

Shapes: T steps, B streams, U distinct words in a batch, E embedding width, D width of the hidden state.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lm.data.batches import DistinctWords
from lm.data.text.vocabulary import Vocabulary
from lm.model.regularization import DropoutMasks
from lm.output.base import OutputLayer
from lm.system.tree import map_leaves

State = Any


def detach(state: State) -> State:
    """Detach the state from its graph, which truncates backpropagation through time."""
    return map_leaves(Tensor.detach, state)


def select_streams(state: State, streams: slice) -> State:
    return map_leaves(lambda tensor: tensor[:, streams], state)


def join_streams(states: Sequence[State]) -> State:
    """Concatenate the states of groups of streams."""
    return map_leaves(lambda *parts: torch.cat(parts, dim=1), *states)


def repeat_stream(state: State, times: int) -> State:
    """Repeat a single stream's state for `times` streams."""
    return map_leaves(lambda tensor: tensor.repeat(1, times, *[1] * (tensor.dim() - 2)), state)


class InputSizes(NamedTuple):
    """Sizes and settings to build an input for."""

    width: int
    """Width of the vectors passed to the core."""
    vocabulary: Vocabulary
    output: OutputLayer
    """The model's output layer, for its clusters and tied word vectors."""
    sparse: bool
    """Whether a training step updates only the rows of words in the batch."""
    tied: bool = False
    """Whether the input shares the output layer's word vectors."""


class Input(nn.Module, ABC):
    """Maps words to vectors of size `width`."""

    width: int

    @classmethod
    @abstractmethod
    def build(cls, settings: Any, sizes: InputSizes) -> "Input":
        """Build the input from its settings."""

    def rows_by_word(self) -> list[tuple[Tensor, list[int]]]:
        """Parameters with one row per word, each with its rows' word ids; see `OutputLayer.rows_by_word`."""
        return []

    def plan(self, distinct_U: Tensor) -> Any:
        """Host-side plan for a batch's distinct words, given in increasing order."""
        return None

    @abstractmethod
    def forward(self, words: Tensor, distinct: DistinctWords | None = None) -> Tensor:
        """Embed words, (..., E); in training, `distinct` holds the batch's distinct words and their plan."""

    def ids_of_unseen(self, words: Sequence[str]) -> list[int] | None:
        """Return ids that `forward` accepts for OOV words; None if they have no vectors."""
        return None


class Core(nn.Module, ABC):
    """Maps embedded words to hidden states of size `width`; the constructor's only argument is the settings."""

    width: int
    looks_back: int = 0
    """Number of words that fill a bounded memory; evaluation warms up on at least this many."""

    @abstractmethod
    def forward(self, input_TBE: Tensor, state: State, masks: DropoutMasks | None) -> tuple[Tensor, State]:
        """Return hidden states (T, B, D) and the state after the last step.

        `masks` are for dropout between layers, None outside training; the model drops out embeddings and outputs.
        """

    @abstractmethod
    def initial_state(self, num_streams: int, *, device: torch.device) -> State:
        """Return the state before the first word; streams are on dimension 1 of its tensors."""
