"""Feed-forward network versus a reference that processes one window at a time."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lm.model.cores.feedforward import Feedforward, FeedforwardConfig
from tests.helpers.slow_definitions import TOLERANCES, assert_core_is

FUNCTIONS = {
    "tanh": lambda z: (z.exp() - (-z).exp()) / (z.exp() + (-z).exp()),
    "sigmoid": lambda z: 1 / (1 + (-z).exp()),
    "relu": lambda z: torch.where(z > 0, z, 0),
}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", ["tanh", "sigmoid", "relu"])
@pytest.mark.parametrize(("window", "layers", "projection"), [(1, 1, None), (4, 2, 3), (9, 1, None)])
def test_outputs_and_gradients_match_reference(
    window: int, layers: int, projection: int | None, kind: Any, dtype: torch.dtype
) -> None:
    """Window 9 is longer than the batch's six steps."""

    def by_hand(core: Feedforward, inputs_TBE: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        seen, outputs = list(state), []
        for x in inputs_TBE:
            seen.append(x)
            hidden = torch.cat(seen[len(seen) - window :], dim=-1)
            for layer in core.layers:
                hidden = FUNCTIONS[kind](hidden @ layer.weight.T + layer.bias)
            outputs.append(hidden)
        hidden = torch.stack(outputs)
        after = torch.stack(seen[len(seen) - window + 1 :]) if window > 1 else state
        return hidden if core.projection is None else hidden @ core.projection.weight.T, after

    values = {"window": window, "layers": layers, "projection": projection, "nonlinearity": kind}
    core = Feedforward(FeedforwardConfig("feedforward", 5, 7, 0.0, **values))  # type: ignore[arg-type]
    assert_core_is(core, by_hand, width=5, dtype=dtype)
