"""AdamW: against torch's, with all rows used and with a plain loop over the words where they are not."""

import math

import pytest
import torch
from torch import Tensor

from lm.config.groups import EmbeddingUpdate
from lm.optim.optimizer import build_optimizer
from lm.optim.optimizers.decoupled import AdamConfig
from tests.helpers.toy_model import WORDS, Toy, batches, loss_of, train

LR = 0.01


def settings(**changes: object) -> AdamConfig:
    return AdamConfig("adam", LR, **{"max_grad_norm": None, **changes})  # type: ignore[arg-type]


def rate(step: int) -> float:
    return LR * (1 - step / 250)


def torch_adamw(model: Toy, steps: list[Tensor], *, weight_decay: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay)
    for step, words_N in enumerate(steps):
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.zero_grad()
        model.loss(words_N).backward()
        optimizer.step()


def assert_near(one: Toy, other: Toy, *, atol: float) -> None:
    for name, value in one.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=0, atol=atol)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_two_hundred_steps_of_the_dense_form_are_those_of_torch(weight_decay: float) -> None:
    config = settings(embedding=EmbeddingUpdate.dense, weight_decay=weight_decay)
    ours, theirs = train(config, num_steps=200, rate=rate), Toy(sparse=False)
    torch_adamw(theirs, batches(200), weight_decay=weight_decay)
    assert_near(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_rows_that_every_step_uses_are_those_of_torch(weight_decay: float) -> None:
    """In double precision: torch's own steps in single precision differ from these by up to three times as much."""
    torch.manual_seed(3)
    every_word = [torch.randperm(WORDS) for _ in range(50)]
    model, theirs = Toy(sparse=True), Toy(sparse=False).double()
    optimizer = build_optimizer(model, settings(weight_decay=weight_decay))
    for step, words_N in enumerate(every_word):
        loss = model.loss(words_N)
        loss.backward()
        optimizer.step(loss.detach(), lr=rate(step), num_steps=1)
    optimizer.apply_pending_decay()
    torch_adamw(theirs, every_word, weight_decay=weight_decay)
    assert_near(model.double(), theirs, atol=1e-6)


@pytest.mark.parametrize("by_word", [False, True])
def test_idle_rows_keep_their_moments_and_decay(by_word: bool) -> None:
    form = EmbeddingUpdate.rowwise if by_word else EmbeddingUpdate.sparse
    ours = train(settings(embedding=form, weight_decay=0.1), num_steps=100, rate=rate)

    reference = Toy(sparse=False).double()
    dense = torch.optim.AdamW(reference.map.parameters(), lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    moments: dict[int, list[Tensor]] = {}
    uses = [0] * WORDS
    for step, words_N in enumerate(batches(100)):
        dense.param_groups[0]["lr"] = rate(step)
        reference.zero_grad()
        loss_of(reference.map(reference.input(words_N)), words_N).backward()
        dense.step()
        gradient = reference.input.weight.grad
        assert gradient is not None
        with torch.no_grad():
            reference.input.weight *= 1 - rate(step) * 0.1
            for word in set(words_N.tolist()):
                uses[word] += 1
                square = gradient[word].square().mean() if by_word else gradient[word].square()
                mean, mean_square = moments.get(word, [torch.zeros(()), torch.zeros(())])
                moments[word] = [0.9 * mean + 0.1 * gradient[word], 0.999 * mean_square + 0.001 * square]
                mean = moments[word][0] / (1 - 0.9 ** uses[word])
                mean_square = moments[word][1] / (1 - 0.999 ** uses[word])
                reference.input.weight[word] -= rate(step) * mean / (mean_square.sqrt() + 1e-8)
    assert_near(ours.double(), reference, atol=2e-6)
    assert min(uses) == 0, "some word was never used"
    start = Toy(sparse=False).input.weight[-1].double()
    owed = math.fsum(math.log1p(-rate(step) * 0.1) for step in range(100))
    torch.testing.assert_close(ours.input.weight[-1], start * math.exp(owed), rtol=1e-5, atol=0)


def test_one_second_moment_per_word_takes_a_column() -> None:
    state = build_optimizer(Toy(sparse=True), settings(embedding=EmbeddingUpdate.rowwise)).state_dict()
    assert state["tables"]["input"]["square"].shape == (WORDS, 1)
