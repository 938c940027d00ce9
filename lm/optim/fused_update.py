"""Whole parameters updated by torch's fused kernels.

Through torch's functions, because its classes import its compiler, which takes longer than torch itself.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from lm.optim.optimizer import DenseUpdate


class FusedUpdate(DenseUpdate):
    """One call of a kernel for all parameters; `start` says at which numbers each kind of state begins."""

    def __init__(self, parameters: list[nn.Parameter], *, start: dict[str, float]) -> None:
        super().__init__(parameters)
        # The fused kernels refuse the meta device, on which a step is only traced.
        self.fused = parameters[0].device.type != "meta"
        self.state = {
            number: {
                "step": torch.zeros((), device=parameter.device if self.fused else "cpu"),
                **{key: torch.full_like(parameter, value, requires_grad=False) for key, value in start.items()},
            }
            for number, parameter in enumerate(parameters)
        }

    @abstractmethod
    def update(
        self, weights: list[Tensor], gradients: list[Tensor], state: dict[str, list[Tensor]], **how: Any
    ) -> None:
        """Call torch's function with its own settings and with `how`, which all of them take."""

    def step(self, *, lr: float, divisor: Tensor, frozen: Tensor) -> None:
        used = [number for number, parameter in enumerate(self.parameters) if parameter.grad is not None]
        gradients = self.gradients()
        if not self.fused:
            torch._foreach_div_(gradients, divisor)
        self.update(
            [self.parameters[number] for number in used],
            gradients,
            {key: [self.state[number][key] for number in used] for key in self.state[0]},
            fused=self.fused,
            foreach=not self.fused,
            # The kernel divides by the one and skips its work on the other, both without a pass or a sync of their own.
            grad_scale=divisor.float() if self.fused else None,
            found_inf=frozen.float() if self.fused else None,
            lr=lr,
            maximize=False,
        )
        for parameter in self.parameters:
            parameter.grad = None
