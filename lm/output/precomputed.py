"""Losses whose gradients are computed in the forward pass, and backpropagation that reuses them without a copy."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

Compute = Callable[[Sequence[bool]], tuple[Tensor, Sequence[Tensor | None]]]
"""Maps one needs-grad flag per tensor (empty for no gradients) to the loss and the tensors' gradients."""


def precomputed(compute: Compute, *tensors: Tensor | None) -> Tensor:
    """Return the loss that `compute` finds; the backward pass only returns the gradients that it found as well."""
    if not torch.is_grad_enabled():
        return compute(())[0]
    return cast(Tensor, _Precomputed.apply(compute, *tensors))  # type: ignore[no-untyped-call]


def backward(losses: Sequence[Tensor]) -> None:
    """Backpropagate from scalar losses; saves a pass over the gradients that `precomputed` found.

    Autograd is given no gradients to start from, because it would import sympy to compare their shapes.
    """
    torch.autograd.backward([cast(Tensor, _Root.apply(loss)) for loss in losses])  # type: ignore[no-untyped-call]


class _Root(torch.autograd.Function):
    """Marks the gradient of a loss as a 1; a sum of losses passes the marked tensor on to each of them."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:  # noqa: ARG004
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        grad.is_unit_gradient = True  # type: ignore[attr-defined]
        return grad


class _Precomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Compute, *tensors: Tensor | None) -> Tensor:  # noqa: ARG004
        ctx.compute, ctx.wanted = compute, ctx.needs_input_grad[1:]
        loss, ctx.grads = compute(ctx.wanted)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # The gradients are as large as the weights, so they are scaled in place and released. Backpropagating through a
        # retained graph a second time, which training never does, recomputes them.
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            _, grads = ctx.compute(ctx.wanted)
        if getattr(grad_outputs[0], "is_unit_gradient", False):
            return None, *grads
        return None, *(None if grad is None else grad.mul_(grad_outputs[0]) for grad in grads)
