"""Recurrent cores versus their cell equations, one step at a time."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lm.model.cores.feedforward import Feedforward, FeedforwardConfig
from lm.model.cores.recurrent import (
    GRU,
    IRNN,
    LSTM,
    RNN,
    SCRN,
    IRNNConfig,
    RecurrentConfig,
    RecurrentStack,
    RNNConfig,
    SCRNConfig,
)
from lm.system.tree import map_leaves
from lm.training.metrics import read_metrics
from tests.conftest import run_command
from tests.helpers.slow_definitions import TOLERANCES, Definition, assert_core_is

Cell = Callable[[dict[str, Tensor], Tensor, Any], tuple[Tensor, Any]]
"""(weights, input, state) -> (output, state)."""


def lstm(w: dict[str, Tensor], x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    output, cell = state
    gates = x @ w["weight_ih"].T + w["bias_ih"] + output @ w["weight_hh"].T + w["bias_hh"]
    i, f, g, o = gates.chunk(4, dim=-1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    output = o.sigmoid() * cell.tanh()
    output = output @ w["weight_hr"].T if "weight_hr" in w else output
    return output, (output, cell)


def gru(w: dict[str, Tensor], x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    from_x = (x @ w["weight_ih"].T + w["bias_ih"]).chunk(3, dim=-1)
    from_h = (hidden @ w["weight_hh"].T + w["bias_hh"]).chunk(3, dim=-1)
    reset, update = (from_x[0] + from_h[0]).sigmoid(), (from_x[1] + from_h[1]).sigmoid()
    hidden = (1 - update) * (from_x[2] + reset * from_h[2]).tanh() + update * hidden
    return hidden, hidden


def elman(function: Callable[[Tensor], Tensor]) -> Cell:
    def cell(w: dict[str, Tensor], x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = function(x @ w["weight_ih"].T + w["bias_ih"] + hidden @ w["weight_hh"].T + w["bias_hh"])
        return hidden, hidden

    return cell


def unrolled(cell: Cell) -> Definition:
    """Unroll stacked layers of a cell and project the top layer's output."""

    def by_hand(core: RecurrentStack, inputs_TBE: Tensor, state: list[Any]) -> tuple[Tensor, list[Any]]:
        after = []
        for layer, before in zip(core.layers, state, strict=True):
            weights = {name.removesuffix("_l0"): p for name, p in layer.named_parameters()}
            carried, outputs = map_leaves(lambda t: t[0], before), []
            for x in inputs_TBE:
                output, carried = cell(weights, x, carried)
                outputs.append(output)
            inputs_TBE = torch.stack(outputs)
            after.append(map_leaves(lambda t: t[None], carried))
        return inputs_TBE if core.projection is None else inputs_TBE @ core.projection.weight.T, after

    return by_hand


SIGMOID, TANH = RNNConfig("rnn", 5, 7), RNNConfig("rnn", 5, 7, nonlinearity="tanh")
CELLS = {
    "lstm": (LSTM, RecurrentConfig("lstm", 5, 7), lstm),
    "gru": (GRU, RecurrentConfig("gru", 5, 7), gru),
    "sigmoid": (RNN, SIGMOID, elman(lambda z: 1 / (1 + (-z).exp()))),
    "tanh": (RNN, TANH, elman(torch.tanh)),
    "irnn": (IRNN, IRNNConfig("irnn", 5, 7), elman(lambda z: torch.where(z > 0, z, 0))),
}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("layers", "projection"), [(1, None), (2, 3)])
@pytest.mark.parametrize("name", CELLS)
def test_outputs_and_gradients_match_equations(
    name: str, layers: int, projection: int | None, dtype: torch.dtype
) -> None:
    kind, config, cell = CELLS[name]
    config = replace(config, layers=layers, projection=projection)  # type: ignore[type-var]
    assert_core_is(kind(config), unrolled(cell), width=5, dtype=dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_scrn_matches_equations(dtype: torch.dtype) -> None:
    def by_hand(core: SCRN, inputs_TBE: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        from_word, from_context = core.fast.weight_ih_l0.split([5, 3], dim=1)
        slow, fast, outputs = state[0][0], state[1][0], []
        for x in inputs_TBE:
            slow = (1 - 0.9) * (x @ core.context.weight.T) + 0.9 * slow
            z = slow @ from_context.T + x @ from_word.T + fast @ core.fast.weight_hh_l0.T
            fast = 1 / (1 + (-z).exp())
            outputs.append(torch.cat([fast, slow], dim=-1))
        return torch.stack(outputs), (slow[None], fast[None])

    core = SCRN(SCRNConfig("scrn", 5, 7, 0.0, context_size=3, memory=0.9))
    assert core.width == 10, "the output layer sees both"
    assert_core_is(core, by_hand, width=5, dtype=dtype)


def test_lstm_initialization() -> None:
    torch.manual_seed(0)
    named = dict(LSTM(RecurrentConfig("lstm", 5, 64, layers=2, projection=32)).named_parameters())
    weights = torch.cat([p.detach().flatten() for name, p in named.items() if "weight" in name])
    assert 0.099 < weights.abs().max() <= 0.1
    assert weights.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.05)
    for layer in range(2):
        i, f, g, o = (named[f"layers.{layer}.bias_ih_l0"] + named[f"layers.{layer}.bias_hh_l0"]).chunk(4)
        assert torch.equal(torch.stack([i, f, g, o]), torch.tensor([0.0, 1, 0, 0])[:, None].expand(4, 64))


@pytest.mark.parametrize("identity", [1.0, 0.5])
def test_irnn_starts_at_identity(identity: float) -> None:
    core = IRNN(IRNNConfig("irnn", 5, 7, 0.0, layers=2, identity=identity))
    held = torch.rand(1, 2, 7)
    _, after = core(torch.zeros(3, 2, 5), [held, held], None)
    torch.testing.assert_close(after[0], identity**3 * held)
    assert all(torch.equal(layer.weight_hh_l0, identity * torch.eye(7)) for layer in core.layers)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_irnn_is_stable_from_the_first_steps_of_the_default_run(workspace: Path, seed: int) -> None:
    steps = ["trainer.max_steps=30", "trainer.eval_every_steps=10"]
    run_command(workspace, "train.py", "model=irnn", *steps, f"seed={seed}", "output.cost_model=flops", "run_dir=run")
    perplexities = [record["valid/ppl"] for record in read_metrics(workspace / "run") if "valid/ppl" in record]
    assert len(perplexities) == 3 and max(perplexities) < 10_000
    assert perplexities[-1] < 212.25, "the unigram's"


# ---- feed-forward networks -------------------------------------------------------------------------------------------


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
