"""The IRNN against its equation, and where it starts."""

import pytest
import torch
from torch import Tensor

from lm.model.cores.recurrent import IRNN, IRNNConfig
from tests.helpers.slow_definitions import TOLERANCES, assert_core_is


def by_hand(core: IRNN, inputs_TBE: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    after = []
    for layer, before in zip(core.layers, state, strict=True):
        w = dict(layer.named_parameters())
        hidden, outputs = before[0], []
        for x in inputs_TBE:
            z = x @ w["weight_ih_l0"].T + w["bias_ih_l0"] + hidden @ w["weight_hh_l0"].T + w["bias_hh_l0"]
            hidden = torch.where(z > 0, z, 0)
            outputs.append(hidden)
        inputs_TBE = torch.stack(outputs)
        after.append(hidden[None])
    return inputs_TBE, after


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("layers", [1, 2])
def test_values_and_gradients_are_the_definitions(layers: int, dtype: torch.dtype) -> None:
    assert_core_is(IRNN(IRNNConfig("irnn", 5, 7, 0.0, layers=layers)), by_hand, width=5, dtype=dtype)


@pytest.mark.parametrize("identity", [1.0, 0.5])
def test_it_starts_by_keeping_what_it_holds(identity: float) -> None:
    core = IRNN(IRNNConfig("irnn", 5, 7, 0.0, layers=2, identity=identity))
    for layer in core.layers:
        assert torch.equal(layer.weight_hh_l0, identity * torch.eye(7))
        assert not layer.bias_ih_l0.any() and not layer.bias_hh_l0.any()
    held = torch.rand(1, 2, 7)
    _, after = core(torch.zeros(3, 2, 5), [held, held], None)
    torch.testing.assert_close(after[0], identity**3 * held)
