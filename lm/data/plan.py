"""What an output layer or an input computes about a batch on the host, before the batch goes to the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """Bucketing of a batch's targets, made before the batch is copied to the device.

    Tensors are copied with the batch; counts stay on the host, so that sizing a slice needs no synchronisation.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    counts: tuple[int, ...] = ()

    def to(self, device: torch.device) -> Plan:
        return self.moved(lambda tensor: tensor.to(device, non_blocking=True))

    def moved(self, move: Callable[[Tensor], Tensor]) -> Plan:
        return Plan({name: move(tensor) for name, tensor in self.tensors.items()}, self.counts)


class DistinctWords(NamedTuple):
    """The distinct words among a batch's inputs, in increasing order."""

    words_U: Tensor
    inverse: Tensor
    """For each input, its place among them."""
    plan: Plan
    """What the input has counted about them on the host."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> DistinctWords:
        return DistinctWords(move(self.words_U), move(self.inverse), self.plan.moved(move))
