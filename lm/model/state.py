"""The state that a core carries from step to step: any tree of lists, tuples and dicts of tensors.

Streams are on dimension 1 of every tensor. Only the core that made a state looks inside; everybody else uses these.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

State = Any


def map_state(change: Callable[..., Tensor], state: State, *others: State) -> State:
    """The tree with each tensor replaced by `change` of it and of the tensors in the same place of the others."""
    if isinstance(state, Tensor):
        return change(state, *others)
    if isinstance(state, dict):
        return {key: map_state(change, value, *(other[key] for other in others)) for key, value in state.items()}
    return type(state)(map_state(change, *parts) for parts in zip(state, *others, strict=True))


def detach(state: State) -> State:
    """Cut from the graph that made it: where back-propagation through time is truncated."""
    return map_state(Tensor.detach, state)


def select_streams(state: State, streams: slice) -> State:
    return map_state(lambda tensor: tensor[:, streams], state)


def join_streams(states: Sequence[State]) -> State:
    """The states of groups of streams, side by side."""
    return map_state(lambda *parts: torch.cat(parts, dim=1), *states)


def repeat_stream(state: State, times: int) -> State:
    """One stream's state for many streams."""
    return map_state(lambda tensor: tensor.repeat(1, times, *[1] * (tensor.dim() - 2)), state)
