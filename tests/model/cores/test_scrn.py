"""The structurally constrained network against its two equations."""

import pytest
import torch
from torch import Tensor

from lm.model.cores.recurrent import SCRN, SCRNConfig
from tests.helpers.slow_definitions import TOLERANCES, assert_core_is


def by_hand(core: SCRN, inputs_TBE: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    from_word, from_context = core.fast.weight_ih_l0.split([5, 3], dim=1)
    slow, fast, outputs = state[0][0], state[1][0], []
    for x in inputs_TBE:
        slow = (1 - 0.9) * (x @ core.context.weight.T) + 0.9 * slow
        z = slow @ from_context.T + x @ from_word.T + fast @ core.fast.weight_hh_l0.T
        fast = 1 / (1 + (-z).exp())
        outputs.append(torch.cat([fast, slow], dim=-1))
    return torch.stack(outputs), (slow[None], fast[None])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_values_and_gradients_are_the_definitions(dtype: torch.dtype) -> None:
    core = SCRN(SCRNConfig("scrn", 5, 7, 0.0, context_size=3, memory=0.9))
    assert core.width == 10, "the output layer sees both"
    assert_core_is(core, by_hand, width=5, dtype=dtype)
