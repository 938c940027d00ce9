"""The contracts of inputs and cores, the state that a core carries from step to step, and dropout.

A state is any tree of lists, tuples and dicts of tensors, with the streams on dimension 1 of every tensor. Only the
core that made a state reads its content; all other code uses the functions here.

Dropout masks depend on the seed and the step alone, never on history or on the number of ranks.

Shapes: T steps, B streams, U distinct words of a batch, E embedding width, D width of the hidden state.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lm.data.batches import DistinctWords
from lm.data.text.vocabulary import Vocabulary
from lm.output.base import OutputLayer
from lm.system.randomness import generator_for
from lm.system.tree import map_leaves

State = Any


def detach(state: State) -> State:
    """The state without its graph: truncates backpropagation through time."""
    return map_leaves(Tensor.detach, state)


def select_streams(state: State, streams: slice) -> State:
    return map_leaves(lambda tensor: tensor[:, streams], state)


def join_streams(states: Sequence[State]) -> State:
    """One state from the states of groups of streams."""
    return map_leaves(lambda *parts: torch.cat(parts, dim=1), *states)


def repeat_stream(state: State, times: int) -> State:
    """The state of one stream, copied for `times` streams."""
    return map_leaves(lambda tensor: tensor.repeat(1, times, *[1] * (tensor.dim() - 2)), state)


@dataclass(frozen=True)
class DropoutMasks:
    """Source of the dropout masks of a training step; evaluation passes None instead."""

    seed: int
    step: int
    num_streams: int
    """Streams of the whole batch over all ranks; masks are drawn for all of them."""
    streams: slice
    """Streams that are computed here."""

    def of(self, streams: slice) -> "DropoutMasks":
        """The masks of a micro-batch, given as a slice of the computed streams."""
        first = self.streams.start
        return replace(self, streams=slice(first + streams.start, first + streams.stop))

    def keep(self, x_TBE: Tensor, probability: float, *, purpose: str) -> Tensor:
        """A mask for the computed streams: 1 with this probability, else 0."""
        steps, _, width = x_TBE.shape
        generator = generator_for(self.seed, purpose, self.step, device=x_TBE.device)
        mask_TBE = x_TBE.new_empty(steps, self.num_streams, width).bernoulli_(probability, generator=generator)
        if self.streams == slice(0, self.num_streams):
            return mask_TBE
        return mask_TBE[:, self.streams].contiguous()  # a copy, to free the other streams' masks


def drop(x_TBE: Tensor, masks: DropoutMasks | None, probability: float, *, layer: str) -> Tensor:
    """Zero entries with this probability and scale up the others; masks of different layers are independent."""
    if masks is None or probability == 0:
        return x_TBE
    keep = 1 - probability
    return x_TBE * masks.keep(x_TBE, keep, purpose=f"dropout {layer}").div_(keep)


class InputSizes(NamedTuple):
    """What an input is built for."""

    width: int
    """Width of the vectors that the core reads."""
    vocabulary: Vocabulary
    output: OutputLayer
    """The model's output layer, for its clusters and shared word vectors."""
    sparse: bool
    """Whether a training step updates only the rows of the batch's words."""
    tied: bool = False
    """Whether the input reads the output layer's word vectors."""


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

    def plan(self, distinct_U: Tensor) -> Any:  # noqa: ARG002
        """Host-side plan of a batch's distinct words, which are in increasing order."""
        return None

    @abstractmethod
    def forward(self, words: Tensor, distinct: DistinctWords | None = None) -> Tensor:
        """Vectors of the words, (..., E); in training, `distinct` holds the batch's distinct words and their plan."""

    def ids_of_unseen(self, words: Sequence[str]) -> list[int] | None:  # noqa: ARG002
        """Ids under which `forward` accepts words outside the vocabulary; None if they have no vectors."""
        return None


class Core(nn.Module, ABC):
    """Embedded words to hidden states of `width` numbers; the constructor's only argument is the settings."""

    width: int

    @abstractmethod
    def forward(self, input_TBE: Tensor, state: State, masks: DropoutMasks | None) -> tuple[Tensor, State]:
        """Hidden states (T, B, D) and the state after the last step; `masks` is None outside training."""

    @abstractmethod
    def initial_state(self, num_streams: int, *, device: torch.device) -> State:
        """The state before the first word; streams are on dimension 1 of its tensors."""
