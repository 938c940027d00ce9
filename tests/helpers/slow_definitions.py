"""Compare a core or input with a slow reference: outputs and gradients, in float32 and float64."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lm.model.base import Core, State
from lm.system.tree import leaves, map_leaves

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10}
Definition = Callable[[Any, Tensor, State], tuple[Tensor, State]]


def random_leaf(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.rand(like.shape, dtype=dtype).requires_grad_()


def assert_core_is(core: Core, definition: Definition, *, width: int, dtype: torch.dtype) -> None:
    """Compare from a random state, with a loss over all hidden states and the final state."""
    torch.manual_seed(1)
    core = core.to(dtype)
    with torch.no_grad():
        for parameter in core.parameters():
            parameter.add_(torch.randn_like(parameter) / 5)  # also tests biases, which start at zero
    input_TBE = torch.randn(6, 2, width, dtype=dtype, requires_grad=True)
    state = map_leaves(lambda t: random_leaf(t, dtype), core.initial_state(2, device=torch.device("cpu")))
    wanted = [input_TBE, *leaves(state), *core.parameters()]
    found = values_and_gradients(*core(input_TBE, state, None), wanted)
    expected = values_and_gradients(*definition(core, input_TBE, state), wanted)
    assert_same(found, expected, dtype=dtype)


def values_and_gradients(hidden: Tensor, after: State, wanted: Sequence[Tensor]) -> list[Tensor]:
    values = [hidden, *leaves(after)]
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v.dtype) for v in values]
    loss = sum((weight * value).sum() for weight, value in zip(weights, values, strict=True))
    gradients = torch.autograd.grad(loss, list(wanted))  # type: ignore[arg-type]
    return [*(value.detach() for value in values), *gradients]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor], *, dtype: torch.dtype) -> None:
    """Compare to within 1e-5 of the largest value in float32, 1e-10 in float64."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        scale = max(1.0, float(theirs.abs().max())) if theirs.numel() else 1.0
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCES[dtype] * scale)
