"""Gated recurrent units against the textbook's gates."""

import pytest
import torch
from torch import Tensor

from lm.model.cores.recurrent import GRU, GRUConfig
from tests.helpers.slow_definitions import TOLERANCES, assert_core_is


def by_hand(core: GRU, inputs_TBE: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    after = []
    for layer, before in zip(core.layers, state, strict=True):
        w = dict(layer.named_parameters())
        hidden, outputs = before[0], []
        for x in inputs_TBE:
            from_x = (x @ w["weight_ih_l0"].T + w["bias_ih_l0"]).chunk(3, dim=-1)
            from_h = (hidden @ w["weight_hh_l0"].T + w["bias_hh_l0"]).chunk(3, dim=-1)
            reset, update = (from_x[0] + from_h[0]).sigmoid(), (from_x[1] + from_h[1]).sigmoid()
            new = (from_x[2] + reset * from_h[2]).tanh()
            hidden = (1 - update) * new + update * hidden
            outputs.append(hidden)
        inputs_TBE = torch.stack(outputs)
        after.append(hidden[None])
    return inputs_TBE if core.projection is None else inputs_TBE @ core.projection.weight.T, after


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("layers", "projection"), [(1, None), (2, 3)])
def test_values_and_gradients_are_the_definitions(layers: int, projection: int | None, dtype: torch.dtype) -> None:
    config = GRUConfig("gru", 5, 7, 0.0, layers=layers, projection=projection)
    assert_core_is(GRU(config), by_hand, width=5, dtype=dtype)
