"""Optimizer: the row forms against plain references, clipping, decay, schedules, and what a non-finite loss does."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lm.config.groups import Reduction, Schedule
from lm.optim.optimizer import build_optimizer
from lm.optim.optimizers.adagrad import ACCUMULATOR_START, EPSILON, AdagradConfig, EmbeddingUpdate
from lm.optim.schedule import learning_rate
from lm.optim.sparse_table import SparseTable

WORDS, WIDTH = 23, 4


class Toy(nn.Module):
    """A word table and a linear map: the smallest model with both kinds of parameters."""

    def __init__(self, *, by_rows: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.input = SparseTable(WORDS, WIDTH, by_rows=by_rows)
        nn.init.uniform_(self.input.weight, -0.1, 0.1)
        self.map = nn.Linear(WIDTH, 3, bias=False)

    def loss(self, words_N: Tensor) -> Tensor:
        rows_U, inverse_N = torch.unique(words_N, return_inverse=True)
        return loss_of(self.map(self.input(words_N, rows_U, inverse_N)), words_N)


def loss_of(logits_N3: Tensor, words_N: Tensor) -> Tensor:
    """Small as a row's share of a real batch is: with larger gradients, Adagrad's first steps amplify rounding."""
    return nn.functional.cross_entropy(logits_N3, words_N % 3) / 50


def settings(**changes: object) -> AdagradConfig:
    values: dict[str, object] = {
        "name": "adagrad",
        "lr": 0.1,
        "schedule": Schedule.constant,
        "reduction": Reduction.stream,
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "embedding_update": EmbeddingUpdate.sparse,
    }
    return AdagradConfig(**{**values, **changes})  # type: ignore[arg-type]


def batches(num_steps: int) -> list[Tensor]:
    """Words that come back after very different pauses, some never."""
    generator = torch.Generator().manual_seed(1)
    weights = 1 / torch.arange(1, WORDS + 1).float() ** 2
    weights[-1] = 0
    return [torch.multinomial(weights, 6, replacement=True, generator=generator) for _ in range(num_steps)]


def train(config: AdagradConfig, *, num_steps: int, rate: Callable[[int], float] = lambda _: 0.1) -> Toy:
    model = Toy(by_rows=config.embedding_update is not EmbeddingUpdate.dense)
    optimizer = build_optimizer(model, config)
    for step, words_N in enumerate(batches(num_steps)):
        loss = model.loss(words_N)
        loss.backward()
        optimizer.step(loss.detach(), lr=rate(step), num_steps=1)
    optimizer.apply_pending_decay()
    return model


@pytest.mark.parametrize("weight_decay", [0.0, 1e-6, 1e-5])
@pytest.mark.parametrize("clip", [None, 0.005])
def test_sparse_equals_dense(weight_decay: float, clip: float | None) -> None:
    changes = {"weight_decay": weight_decay, "max_grad_norm": clip}
    sparse = train(settings(embedding_update=EmbeddingUpdate.sparse, **changes), num_steps=200)
    dense = train(settings(embedding_update=EmbeddingUpdate.dense, **changes), num_steps=200)
    torch.testing.assert_close(sparse.input.weight, dense.input.weight, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sparse.map.weight, dense.map.weight, rtol=1e-5, atol=1e-5)
    assert not torch.equal(sparse.input.weight, Toy(by_rows=True).input.weight)


def test_lazy_decay_reaches_rows_that_are_never_used_and_follows_the_learning_rate() -> None:
    rates = [0.1 if step < 60 else 0.05 for step in range(100)]
    config = settings(weight_decay=1e-5)
    model = train(config, num_steps=100, rate=rates.__getitem__)
    expected = Toy(by_rows=True).input.weight[-1].double()
    for rate in rates:
        expected = expected * (1 - rate * 1e-5 / math.sqrt(ACCUMULATOR_START))
    torch.testing.assert_close(model.input.weight[-1].double(), expected, rtol=1e-6, atol=0)


def test_rowwise_equals_the_plain_definition() -> None:
    model = train(
        settings(embedding_update=EmbeddingUpdate.rowwise, weight_decay=1e-3, max_grad_norm=0.1), num_steps=50
    )

    reference = Toy(by_rows=False)
    accumulator = [ACCUMULATOR_START] * WORDS
    dense = torch.optim.Adagrad(
        reference.map.parameters(), lr=0.1, weight_decay=1e-3, initial_accumulator_value=ACCUMULATOR_START, eps=EPSILON
    )
    for words in batches(50):
        vectors = [reference.input.weight[word].detach().clone().requires_grad_() for word in words]
        loss = loss_of(reference.map(torch.stack(vectors)), words)
        loss.backward()
        # Only the dense parameters are clipped and decayed.
        nn.utils.clip_grad_norm_(reference.map.parameters(), 0.1)
        dense.step()
        dense.zero_grad()
        with torch.no_grad():
            gradients: dict[int, list[Tensor]] = {}
            for word, vector in zip(words.tolist(), vectors, strict=True):
                gradients.setdefault(word, []).append(vector.grad)
            for word, occurrences in gradients.items():
                accumulator[word] += sum(float(g.square().mean()) for g in occurrences)
                reference.input.weight[word] -= 0.1 * sum(occurrences) / math.sqrt(accumulator[word])
    torch.testing.assert_close(model.input.weight, reference.input.weight, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.map.weight, reference.map.weight, rtol=1e-5, atol=1e-5)


def test_gradients_are_clipped_by_the_global_norm_of_rows_and_dense_parameters() -> None:
    """Two words and a map whose gradients are known: the applied gradient has exactly the norm `clip`."""
    for clip, expected in [(1e-3, 1e-3), (1e6, None)]:
        model = Toy(by_rows=True)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = build_optimizer(model, settings(max_grad_norm=clip))
        loss = model.loss(torch.tensor([3, 3, 5]))
        loss.backward()
        plain = Toy(by_rows=False)
        plain.loss(torch.tensor([3, 3, 5])).backward()
        true_norm = math.sqrt(sum(float(p.grad.square().sum()) for p in plain.parameters() if p.grad is not None))
        optimizer.step(loss.detach(), lr=0.1, num_steps=1)
        assert float(optimizer.grad_norm) == pytest.approx(true_norm, rel=1e-5)
        # Undo Adagrad's first step: x = lr g / sqrt(a + g^2) gives g = x sqrt(a / (lr^2 - x^2)).
        after = [p.detach() for p in model.parameters()]
        moves = torch.cat([(b - a).flatten() for b, a in zip(before, after, strict=True)]).double()
        applied = moves * (ACCUMULATOR_START / (0.1**2 - moves**2)).clamp(min=0).sqrt()
        if expected is not None:
            assert float(applied.norm()) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("form", list(EmbeddingUpdate))
def test_a_non_finite_loss_freezes_every_parameter_from_that_step_on(form: EmbeddingUpdate) -> None:
    model = Toy(by_rows=form is not EmbeddingUpdate.dense)
    optimizer = build_optimizer(model, settings(embedding_update=form, weight_decay=1e-3))
    kept: dict[str, Tensor] = {}
    for step, words_N in enumerate(batches(6)):
        loss = model.loss(words_N)
        if step == 3:
            optimizer.apply_pending_decay()
            kept = {name: value.clone() for name, value in model.state_dict().items()}
            loss = loss * math.nan
        loss.backward()
        optimizer.step(loss.detach(), lr=0.1, num_steps=1)
    assert int(optimizer.bad_step) == 4  # counted from 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, kept[name]), name


@pytest.mark.parametrize("form", list(EmbeddingUpdate))
def test_state_survives_saving(form: EmbeddingUpdate) -> None:
    """Ten steps, or five, a save, a load into fresh objects and five more: the same weights to the last bit."""
    config = settings(embedding_update=form, weight_decay=1e-4)
    whole = train(config, num_steps=10)
    first = Toy(by_rows=form is not EmbeddingUpdate.dense)
    second = Toy(by_rows=form is not EmbeddingUpdate.dense)
    optimizer = build_optimizer(first, config)
    for step, words_N in enumerate(batches(10)):
        model = first if step < 5 else second
        if step == 5:
            weights = {name: value.clone() for name, value in first.state_dict().items()}
            state = optimizer.state_dict()
            second.load_state_dict(weights)
            optimizer = build_optimizer(second, config)
            optimizer.load_state_dict(state)
        loss = model.loss(words_N)
        loss.backward()
        optimizer.step(loss.detach(), lr=0.1, num_steps=1)
    optimizer.apply_pending_decay()
    for name, value in second.state_dict().items():
        assert torch.equal(value, whole.state_dict()[name]), name


def test_schedules() -> None:
    halving = settings(schedule=Schedule.halve_after_half)
    rates = [learning_rate(halving, epoch=epoch, max_epochs=10) for epoch in range(10)]
    assert rates == [0.1] * 5 + [0.05, 0.025, 0.0125, 0.00625, 0.003125]
    assert [learning_rate(halving, epoch=epoch, max_epochs=5) for epoch in range(5)] == [0.1] * 3 + [0.05, 0.025]
    assert learning_rate(settings(), epoch=7, max_epochs=None) == 0.1
