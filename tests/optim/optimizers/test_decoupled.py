"""AdamW, RMSprop and SGD: versus torch if every step uses all rows, and versus a loop over words."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lm.optim.optimizer import build_optimizer
from lm.optim.optimizers.decoupled import AdamConfig, DecoupledConfig, RMSpropConfig, SGDConfig
from tests.helpers.toy_model import WORDS, Toy, batches, loss_of, train

ADAM = AdamConfig("adam", 0.01, max_grad_norm=None)
RMSPROP = RMSpropConfig("rmsprop", 0.01, max_grad_norm=None)
SGD = SGDConfig("sgd", 0.5, max_grad_norm=None, momentum=0.9)
Torch = Callable[..., torch.optim.Optimizer]
Direction = Callable[[dict[str, Any], Tensor, Tensor], Tensor]
"""(state, gradient, squared gradient) -> update at rate 1."""


def rate_of(config: DecoupledConfig) -> Callable[[int], float]:
    return lambda step: config.lr * (1 - step / 250)


def train_torch(model: Toy, steps: list[Tensor], config: DecoupledConfig, kind: Torch, **options: Any) -> None:
    optimizer = kind(model.parameters(), lr=config.lr, **options)
    for step, words_N in enumerate(steps):
        optimizer.param_groups[0]["lr"] = rate_of(config)(step)
        optimizer.zero_grad()
        model.loss(words_N).backward()
        optimizer.step()


def assert_near(one: Toy, other: Toy, *, atol: float) -> None:
    for name, value in one.state_dict().items():
        torch.testing.assert_close(value.double(), other.state_dict()[name].double(), rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("config", "kind", "options"),
    [
        (replace(ADAM, weight_decay=0.0), torch.optim.AdamW, {"weight_decay": 0.0}),
        (replace(ADAM, weight_decay=0.1), torch.optim.AdamW, {"weight_decay": 0.1}),
        (RMSPROP, torch.optim.RMSprop, {"alpha": 0.99}),
        (SGD, torch.optim.SGD, {"momentum": 0.9}),
        (replace(SGD, momentum=0.0), torch.optim.SGD, {}),
    ],
)
def test_dense_updates_match_torch(config: DecoupledConfig, kind: Torch, options: dict[str, float]) -> None:
    config = replace(config, embedding="dense")
    ours, theirs = train(config, num_steps=100, rate=rate_of(config)), Toy(sparse=False)
    train_torch(theirs, batches(100), config, kind, **options)
    assert_near(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_rows_used_in_every_step_match_torch(weight_decay: float) -> None:
    """The torch reference uses float64; in float32 it would deviate up to three times as much."""
    torch.manual_seed(3)
    every_word = [torch.randperm(WORDS) for _ in range(50)]
    config = replace(ADAM, weight_decay=weight_decay)
    model, theirs = Toy(sparse=True), Toy(sparse=False).double()
    optimizer = build_optimizer(model, config)
    for step, words_N in enumerate(every_word):
        loss = model.loss(words_N)
        loss.backward()
        optimizer.step(loss.detach(), lr=rate_of(config)(step), num_steps=1)
    optimizer.apply_pending_decay()
    train_torch(theirs, every_word, config, torch.optim.AdamW, weight_decay=weight_decay)
    assert_near(model, theirs, atol=1e-6)


def adam(state: dict[str, Any], gradient: Tensor, square: Tensor) -> Tensor:
    state["uses"] = uses = state.get("uses", 0) + 1
    state["mean"] = 0.9 * state.get("mean", 0) + 0.1 * gradient
    state["square"] = 0.999 * state.get("square", 0) + 0.001 * square
    return state["mean"] / (1 - 0.9**uses) / ((state["square"] / (1 - 0.999**uses)).sqrt() + 1e-8)


def rmsprop(state: dict[str, Any], gradient: Tensor, square: Tensor) -> Tensor:
    state["square"] = 0.99 * state.get("square", 0) + 0.01 * square
    return gradient / (state["square"].sqrt() + 1e-8)


def sgd(state: dict[str, Any], gradient: Tensor, square: Tensor) -> Tensor:  # noqa: ARG001
    state["velocity"] = 0.9 * state.get("velocity", 0) + gradient
    return state["velocity"]


@pytest.mark.parametrize(
    ("config", "direction", "rowwise"),
    [(ADAM, adam, False), (ADAM, adam, True), (RMSPROP, rmsprop, False), (RMSPROP, rmsprop, True), (SGD, sgd, False)],
)
def test_idle_rows_keep_their_moments_and_decay(config: DecoupledConfig, direction: Direction, rowwise: bool) -> None:
    form = "rowwise" if rowwise else "sparse"
    decay = 0.001 / config.lr
    config = replace(config, embedding=form, weight_decay=decay)
    rate = rate_of(config)
    ours, reference = train(config, num_steps=100, rate=rate), Toy(sparse=False).double()
    states: dict[object, dict[str, Any]] = {}
    for step, words_N in enumerate(batches(100)):
        reference.zero_grad()
        loss_of(reference.core(reference.input(words_N)), words_N).backward()
        gradients: dict[object, Tensor] = {"core": reference.core.weight.grad}
        gradients |= {word: reference.input.weight.grad[word] for word in words_N.tolist()}
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter *= 1 - rate(step) * decay
            for key, gradient in gradients.items():
                weight = reference.core.weight if key == "core" else reference.input.weight[key]
                square = gradient.square().mean() if rowwise and key != "core" else gradient.square()
                weight -= rate(step) * direction(states.setdefault(key, {}), gradient, square)
    assert_near(ours, reference, atol=1e-5)
    assert WORDS - 1 not in states, "one word is never used"
    start = Toy(sparse=False).input.weight[-1]
    pending = math.fsum(math.log1p(-rate(step) * decay) for step in range(100))
    torch.testing.assert_close(ours.input.weight[-1], start * math.exp(pending), rtol=1e-5, atol=0)


def test_rowwise_second_moment_has_one_column() -> None:
    state = build_optimizer(Toy(sparse=True), replace(ADAM, embedding="rowwise")).state_dict()
    assert state["tables"]["input"]["square"].shape == (WORDS, 1)
