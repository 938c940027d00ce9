"""What an output layer knows of a batch before the batch leaves the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """What the host knows of a batch's targets before the device sees them.

    Tensors travel with the batch; counts stay on the host, where they size slices without asking the device.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    counts: tuple[int, ...] = ()

    def to(self, device: torch.device) -> Plan:
        return self.moved(lambda tensor: tensor.to(device, non_blocking=True))

    def moved(self, move: Callable[[Tensor], Tensor]) -> Plan:
        return Plan({name: move(tensor) for name, tensor in self.tensors.items()}, self.counts)
