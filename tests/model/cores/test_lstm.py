"""The recurrent core: the LSTM's equations, and randomness that depends on the step alone."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lm.model.base import DropoutMasks, drop
from lm.model.cores.recurrent import LSTM, LSTMConfig


def make(**changes: object) -> LSTM:
    values = {"name": "lstm", "embedding_size": 5, "hidden_size": 7, "layers": 1, "projection": None, "dropout": 0.0}
    torch.manual_seed(0)
    return LSTM(LSTMConfig(**{**values, **changes}))  # type: ignore[arg-type]


def by_hand(core: LSTM, inputs_TBE: Tensor) -> Tensor:
    """The textbook's gates, with the projection where there is one."""
    for layer in core.layers:
        weights = dict(layer.named_parameters())
        batch = inputs_TBE.shape[1]
        output, cell = torch.zeros(batch, core.width), torch.zeros(batch, core.hidden_size)
        outputs = []
        for input_BE in inputs_TBE:
            gates = input_BE @ weights["weight_ih_l0"].T + weights["bias_ih_l0"]
            gates = gates + output @ weights["weight_hh_l0"].T + weights["bias_hh_l0"]
            i, f, g, o = gates.chunk(4, dim=-1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            output = o.sigmoid() * cell.tanh()
            if "weight_hr_l0" in weights:
                output = output @ weights["weight_hr_l0"].T
            outputs.append(output)
        inputs_TBE = torch.stack(outputs)
    return inputs_TBE


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("projection", [None, 3])
def test_equations(layers: int, projection: int | None) -> None:
    core = make(layers=layers, projection=projection)
    inputs_TBE = torch.randn(6, 2, 5)
    hidden, _ = core(inputs_TBE, core.initial_state(2, device=torch.device("cpu")), None)
    torch.testing.assert_close(hidden, by_hand(core, inputs_TBE))


def test_state_carried_over_a_cut_gives_what_no_cut_gives() -> None:
    core = make(layers=2)
    inputs_TBE = torch.randn(10, 3, 5)
    state = core.initial_state(3, device=torch.device("cpu"))
    whole, _ = core(inputs_TBE, state, None)
    first, state = core(inputs_TBE[:4], state, None)
    second, _ = core(inputs_TBE[4:], state, None)
    torch.testing.assert_close(torch.cat([first, second]), whole)


def test_weights_start_uniform_within_a_tenth_and_biases_at_zero_but_for_the_forget_gate() -> None:
    core = make(hidden_size=64, layers=2, projection=32)
    named = dict(core.named_parameters())
    weights = torch.cat([p.detach().flatten() for name, p in named.items() if "weight" in name])
    assert 0.099 < weights.abs().max() <= 0.1
    assert weights.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.05)
    for number in range(2):
        i, f, g, o = (named[f"layers.{number}.bias_ih_l0"] + named[f"layers.{number}.bias_hh_l0"]).chunk(4)
        assert torch.equal(torch.stack([i, f, g, o]), torch.tensor([0.0, 1, 0, 0])[:, None].expand(4, 64))


def test_dropout_depends_on_seed_and_step_only() -> None:
    core = make(layers=2, dropout=0.5)
    inputs_TBE = torch.randn(6, 2, 5)
    state = core.initial_state(2, device=torch.device("cpu"))

    def run(seed: int, step: int) -> Tensor:
        torch.manual_seed(torch.randint(1000, ()).item())  # history must not matter
        return core(inputs_TBE, state, DropoutMasks.of_batch(seed, step, 2))[0]

    assert torch.equal(run(1, 5), run(1, 5))
    assert not torch.equal(run(1, 5), run(1, 6))
    assert not torch.equal(run(1, 5), run(2, 5))


def test_dropout_keeps_the_expectation_and_drops_its_share() -> None:
    core = make(dropout=0.25)
    ones = torch.ones(200, 20, 5)
    dropped = drop(ones, DropoutMasks.of_batch(1, 1, 20), core.dropout, place="embedding")
    assert set(dropped.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert dropped.mean().item() == pytest.approx(1, abs=0.02)


def test_parts_of_a_batch_get_their_columns_of_the_whole_batchs_masks() -> None:
    core = make(layers=2, dropout=0.5)
    inputs_TBE = torch.randn(6, 7, 5)
    state = core.initial_state(7, device=torch.device("cpu"))
    whole_TBD, _ = core(inputs_TBE, state, DropoutMasks.of_batch(1, 5, 7))
    rank = replace(DropoutMasks.of_batch(1, 5, 7), streams=slice(2, 7))
    for first, last in ((0, 5), (1, 4)):  # of the rank's five streams
        streams = slice(2 + first, 2 + last)
        own_state = [(output[:, streams], cell[:, streams]) for output, cell in state]
        part_TbD, _ = core(inputs_TBE[:, streams], own_state, rank.of(slice(first, last)))
        torch.testing.assert_close(part_TbD, whole_TBD[:, streams])
