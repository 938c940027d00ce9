"""The Elman network against its equation, with both of its non-linearities."""

import pytest
import torch
from torch import Tensor

from lm.model.cores.recurrent import RNN, Nonlinearity, RNNConfig
from tests.helpers.slow_definitions import TOLERANCES, assert_core_is


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", Nonlinearity)
@pytest.mark.parametrize(("layers", "projection"), [(1, None), (2, 3)])
def test_values_and_gradients_are_the_definitions(
    layers: int, projection: int | None, kind: Nonlinearity, dtype: torch.dtype
) -> None:
    def by_hand(core: RNN, inputs_TBE: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        after = []
        for layer, before in zip(core.layers, state, strict=True):
            w = dict(layer.named_parameters())
            hidden, outputs = before[0], []
            for x in inputs_TBE:
                z = x @ w["weight_ih_l0"].T + hidden @ w["weight_hh_l0"].T + w["bias_ih_l0"] + w["bias_hh_l0"]
                hidden = 1 / (1 + (-z).exp()) if kind is Nonlinearity.sigmoid else z.tanh()
                outputs.append(hidden)
            inputs_TBE = torch.stack(outputs)
            after.append(hidden[None])
        return inputs_TBE if core.projection is None else inputs_TBE @ core.projection.weight.T, after

    config = RNNConfig("rnn", 5, 7, 0.0, layers=layers, projection=projection, nonlinearity=kind)
    assert_core_is(RNN(config), by_hand, width=5, dtype=dtype)
