"""Optimizer: sparse updates versus plain references, clipping, decay, and non-finite losses."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from lm.config.groups import OptimConfig, Schedule
from lm.data.batches import Uses
from lm.data.corpus import open_corpus
from lm.optim import sparse_table
from lm.optim.optimizer import Optimizer, build_optimizer, learning_rate
from lm.optim.optimizers.adagrad import (
    ACCUMULATOR_START,
    EPSILON,
    MOST_LAZY_DECAY,
    Adagrad,
    AdagradAdamConfig,
    AdagradConfig,
)
from lm.optim.optimizers.decoupled import AdamConfig, RMSpropConfig, SGDConfig
from lm.optim.sparse_table import SparseTable
from lm.system.errors import UserError
from tests.conftest import Tiny
from tests.helpers.toy_model import WORDS, Toy, batches, loss_of, train
from tests.helpers.training import make_trainer

FORMS = ("sparse", "rowwise", "dense")


def settings(**changes: object) -> AdagradConfig:
    values: dict[str, Any] = {"weight_decay": 0.0}
    return AdagradConfig("adagrad", **values | changes)


def constant(_: int) -> float:
    return 0.1


def falling(step: int) -> float:
    return 0.1 * (1 - step / 200)


@pytest.mark.parametrize("weight_decay", [0.0, 1e-5])
@pytest.mark.parametrize("clip", [None, 0.005])
@pytest.mark.parametrize("rate", [constant, falling])
def test_sparse_matches_dense(weight_decay: float, clip: float | None, rate: Callable[[int], float]) -> None:
    changes = {"weight_decay": weight_decay, "max_grad_norm": clip}
    sparse = train(settings(embedding="sparse", **changes), num_steps=200, rate=rate)
    dense = train(settings(embedding="dense", **changes), num_steps=200, rate=rate)
    torch.testing.assert_close(sparse.input.weight, dense.input.weight, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sparse.core.weight, dense.core.weight, rtol=1e-5, atol=1e-5)
    assert not torch.equal(sparse.input.weight, Toy(sparse=True).input.weight)


def test_lazy_decay_departs_by_a_thousandth_at_its_limit() -> None:
    lazy, dense = (
        train(settings(embedding=form, weight_decay=MOST_LAZY_DECAY), num_steps=400).input.weight
        for form in ("sparse", "dense")
    )
    assert (lazy - dense).abs().max() < 1e-3 * dense.abs().max()


def test_larger_lazy_decay_raises_and_names_the_dense_form() -> None:
    config = settings(weight_decay=2e-4)
    with pytest.raises(UserError, match=r"weight_decay must be .* Try optim\.embedding=dense"):
        build_optimizer(Toy(sparse=True), config)
    train(replace(config, embedding="dense"), num_steps=1)
    train(replace(config, embedding="rowwise"), num_steps=1)  # does not decay rows


def test_lazy_decay_applies_to_unused_rows() -> None:
    rates = [0.1 if step < 60 else 0.05 for step in range(100)]
    config = settings(weight_decay=1e-5)
    model = train(config, num_steps=100, rate=rates.__getitem__)
    expected = Toy(sparse=True).input.weight[-1].double()
    for rate in rates:
        expected = expected * (1 - rate * 1e-5 / math.sqrt(ACCUMULATOR_START))
    torch.testing.assert_close(model.input.weight[-1].double(), expected, rtol=1e-6, atol=0)


def test_idle_rows_are_untouched_until_decay_is_applied() -> None:
    model = Toy(sparse=True)
    optimizer = build_optimizer(model, settings(weight_decay=1e-4))
    before = model.input.weight.detach().clone()
    used = torch.zeros(WORDS, dtype=torch.bool)
    for step, words_N in enumerate(batches(5)):
        loss = model.loss(words_N)
        loss.backward()
        optimizer.step(loss.detach(), lr=falling(step), num_steps=1)
        used[words_N] = True
    assert torch.equal(model.input.weight[~used], before[~used])
    optimizer.apply_pending_decay()
    assert (model.input.weight[~used].abs() < before[~used].abs()).all()


def test_pending_decay_is_applied_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In training, and for weights loaded with optimizer state; allocates nothing as large as the table."""
    config = settings(weight_decay=1e-4)
    whole = train(config, num_steps=10)
    monkeypatch.setattr(sparse_table, "BLOCK_ROWS", 5)
    assert torch.equal(train(config, num_steps=10).input.weight, whole.input.weight)
    with monkeypatch.context() as undecayed:
        states: list[dict[str, Any]] = []
        undecayed.setattr(Optimizer, "apply_pending_decay", lambda self: states.append(self.state_dict()))
        loaded = train(config, num_steps=10)
    assert not torch.equal(loaded.input.weight, whole.input.weight)
    Adagrad.finish_weights(loaded, states[0], config)
    torch.testing.assert_close(loaded.input.weight, whole.input.weight, rtol=1e-6, atol=0)


def test_accumulator_start_is_used() -> None:
    """The first step moves a weight by lr g / sqrt(start + g^2)."""
    for form in FORMS:
        model = Toy(sparse=form != "dense")
        before = {name: value.clone() for name, value in model.state_dict().items()}
        config = settings(accumulator_start=0.5, max_grad_norm=None, embedding=form)
        optimizer = build_optimizer(model, config)
        plain = Toy(sparse=False)
        for each in (model, plain):
            loss = each.loss(torch.tensor([3, 5, 7]))
            loss.backward()
        optimizer.step(loss.detach(), lr=0.1, num_steps=1)
        for name, parameter in plain.named_parameters():
            gradient = parameter.grad
            assert gradient is not None
            square = gradient.square()
            if form == "rowwise" and name.startswith("input"):
                square = square.mean(-1, keepdim=True)
            expected = before[name] - 0.1 * gradient / (0.5 + square).sqrt()
            torch.testing.assert_close(model.state_dict()[name], expected)


def test_rowwise_matches_reference() -> None:
    model = train(settings(embedding="rowwise", weight_decay=1e-3, max_grad_norm=0.1), num_steps=50)

    reference = Toy(sparse=False)
    accumulator = [ACCUMULATOR_START] * WORDS
    dense = torch.optim.Adagrad(
        reference.core.parameters(), lr=0.1, weight_decay=1e-3, initial_accumulator_value=ACCUMULATOR_START, eps=EPSILON
    )
    for words in batches(50):
        vectors = [reference.input.weight[word].detach().clone().requires_grad_() for word in words]
        loss = loss_of(reference.core(torch.stack(vectors)), words)
        loss.backward()
        # Clip and decay only dense parameters.
        nn.utils.clip_grad_norm_(reference.core.parameters(), 0.1)
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
    torch.testing.assert_close(model.core.weight, reference.core.weight, rtol=1e-5, atol=1e-5)


def test_clipping_norm_covers_rows_and_dense_parameters() -> None:
    """Two words and a map with known gradients: the applied gradient has norm `clip`, or its own norm if smaller."""
    for clip in (1e-3, 1e6):
        model = Toy(sparse=True)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = build_optimizer(model, settings(max_grad_norm=clip))
        loss = model.loss(torch.tensor([3, 3, 5]))
        loss.backward()
        plain = Toy(sparse=False)
        plain.loss(torch.tensor([3, 3, 5])).backward()
        true_norm = math.sqrt(sum(float(p.grad.square().sum()) for p in plain.parameters() if p.grad is not None))
        optimizer.step(loss.detach(), lr=0.1, num_steps=1)
        assert float(optimizer.grad_norm) == pytest.approx(true_norm, rel=1e-5)
        # Undo Adagrad's first step: x = lr g / sqrt(a + g^2) gives g = x sqrt(a / (lr^2 - x^2)).
        after = [p.detach() for p in model.parameters()]
        moves = torch.cat([(b - a).flatten() for b, a in zip(before, after, strict=True)]).double()
        applied = moves * (ACCUMULATOR_START / (0.1**2 - moves**2)).clamp(min=0).sqrt()
        assert float(applied.norm()) == pytest.approx(min(clip, true_norm), rel=1e-3)


ALL = [
    *(settings(embedding=form, weight_decay=1e-4) for form in FORMS),
    *(AdagradAdamConfig(core_weight_decay=0.1, embedding=form) for form in FORMS),
    *(AdamConfig("adam", 0.01, embedding=form) for form in FORMS),
    *(RMSpropConfig("rmsprop", 0.01, weight_decay=0.1, embedding=form) for form in FORMS),
    SGDConfig("sgd", 0.5),
    SGDConfig("sgd", 0.5, momentum=0.9, weight_decay=0.01),
    SGDConfig("sgd", 0.5, momentum=0.9, embedding="dense"),
]
every_optimizer = pytest.mark.parametrize("config", ALL, ids=lambda c: f"{c.name}-{c.embedding}")


@every_optimizer
def test_non_finite_loss_freezes_all_parameters(config: OptimConfig) -> None:
    model = Toy(sparse=(config.embedding != "dense"))
    optimizer = build_optimizer(model, config)
    kept: dict[str, Tensor] = {}
    for step, words_N in enumerate(batches(6)):
        loss = model.loss(words_N)
        if step == 3:
            optimizer.apply_pending_decay()
            kept = {name: value.clone() for name, value in model.state_dict().items()}
            loss = loss * math.nan
        loss.backward()
        optimizer.step(loss.detach(), lr=0.1, num_steps=1)
    assert int(optimizer.bad_step) == 4  # steps count from 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, kept[name]), name


@every_optimizer
def test_resumed_optimizer_is_bit_identical(config: OptimConfig) -> None:
    """Ten steps versus five, a save, a load into fresh objects and five more: bit-identical weights."""
    whole = train(config, num_steps=10)
    first, second = Toy(sparse=(config.embedding != "dense")), Toy(sparse=(config.embedding != "dense"))
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


@pytest.mark.parametrize(
    ("lr", "weight_decay", "accumulator_start"),
    [(0.1, 0.1, 1e-5), (1e23, 1e-6, 1e-5), (2, 0.5, 1e-5), (0.1, 1e-6, 1e-14)],
)
def test_sign_flipping_decay_raises_with_working_suggestion(
    lr: float, weight_decay: float, accumulator_start: float
) -> None:
    config = AdagradConfig("adagrad", lr, weight_decay=weight_decay, accumulator_start=accumulator_start)
    (problem,) = config.problems()
    suggested = re.search(r"Try optim\.(lr|weight_decay)=(\S+)\.$", problem)
    assert suggested is not None
    assert not list(replace(config, **{suggested[1]: float(suggested[2])}).problems())


# ---- learning-rate schedules -----------------------------------------------------------------------------------------


def rates(schedule: Schedule, *, steps: int, epochs: int, warmup_steps: int = 0) -> list[float]:
    config = OptimConfig("any", 0.1, schedule=schedule, warmup_steps=warmup_steps)
    per_epoch = steps // epochs
    return [
        learning_rate(config, step=step, epoch=step // per_epoch, max_epochs=epochs, done=step / steps)
        for step in range(steps)
    ]


def test_constant_and_halve_after_half() -> None:
    assert rates("constant", steps=4, epochs=1) == [0.1] * 4
    halved = [0.1] * 5 + [0.05, 0.025, 0.0125, 0.00625, 0.003125]
    assert rates("halve_after_half", steps=10, epochs=10) == halved
    assert rates("halve_after_half", steps=5, epochs=5) == [0.1] * 3 + [0.05, 0.025]


def test_linear_and_cosine_decay_to_zero() -> None:
    assert rates("linear", steps=5, epochs=1) == pytest.approx([0.1, 0.08, 0.06, 0.04, 0.02])
    cosine = [0.1 * math.cos(math.pi * step / 12) ** 2 for step in range(6)]
    assert rates("cosine", steps=6, epochs=1) == pytest.approx(cosine)


@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_warmup_is_linear(schedule: Schedule) -> None:
    plain = rates(schedule, steps=20, epochs=4)
    warmed = rates(schedule, steps=20, epochs=4, warmup_steps=4)
    assert warmed[:4] == pytest.approx([plain[0] / 4, plain[1] / 2, plain[2] * 3 / 4, plain[3]])
    assert warmed[4:] == plain[4:]


def test_plateau_lowers_rate_and_patience_stops_run(tiny: Tiny) -> None:
    config = tiny("optim.schedule=plateau", "optim.plateau_patience=2", "optim.plateau_factor=0.25")
    config.trainer.patience = 5
    trainer, _ = make_trainer(config, open_corpus(config.data), num_batches=1)
    perplexities = [9, 8, 8, 7, 7.5, 7.2, 6, 6, 6, 7, 6, 6]
    lowered = [0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    bests = [True, True, False, True, False, False, True, *[False] * 5]
    for perplexity, times, best in zip(perplexities, lowered, bests, strict=True):
        assert not trainer.finished
        assert trainer.progress.update(perplexity, plateau_patience=2) is best
        assert trainer.learning_rate == pytest.approx(0.1 * 0.25**times)
    assert trainer.finished


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ("trainer.max_steps=40", 40),
        ("trainer.max_steps=null trainer.max_epochs=2", 200),
        ("trainer.max_steps=null trainer.max_tokens=600", 30),
        ("trainer.max_steps=50 trainer.max_epochs=2 trainer.max_seconds=1000", 50),
    ],
)
def test_schedule_follows_earliest_limit(tiny: Tiny, limits: str, steps: int) -> None:
    config = tiny("optim.schedule=linear", *limits.split())
    trainer, _ = make_trainer(config, open_corpus(config.data), num_batches=1)
    for step in (0, 1, 17, steps - 1):
        trainer.progress.step = step
        assert trainer.learning_rate == pytest.approx(0.1 * (1 - step / steps))
        assert not trainer.finished
    trainer.progress.step = steps
    assert trainer.finished


def test_schedule_follows_max_seconds(tiny: Tiny) -> None:
    """Also if epochs are limited but would end later."""
    config = tiny("optim.schedule=linear", "trainer.max_steps=null", "trainer.max_epochs=9", "trainer.max_seconds=20")
    trainer, _ = make_trainer(config, open_corpus(config.data), num_batches=1)
    trainer.progress.step, trainer.seconds = 10, 5.0
    assert trainer.learning_rate == pytest.approx(0.1 * 0.75)
    trainer.seconds = 20.5
    assert trainer.learning_rate == 0
    assert trainer.finished


# ---- sparse tables ---------------------------------------------------------------------------------------------------


def test_row_gradients_match_dense_gradient() -> None:
    torch.manual_seed(0)
    sparse, dense = SparseTable(9, 3), SparseTable(9, 3, sparse=False)
    with torch.no_grad():
        sparse.weight.normal_()
        dense.weight.copy_(sparse.weight)
    words = torch.tensor([[4, 1], [4, 8]])
    rows, inverse = torch.unique(words, return_inverse=True)
    for table in (sparse, dense):
        table(words, rows, Uses.of(inverse, num_rows=len(rows))).sin().square().sum().backward()
    used = sparse.take_used()
    assert used is not None and used.uses is not None and used.values.grad is not None
    summed = used.uses.sum(used.values.grad.flatten(0, 1))
    assert sparse.weight.grad is None
    torch.testing.assert_close(summed, dense.weight.grad[rows])


def test_used_rows_are_returned_once_and_only_in_training() -> None:
    table = SparseTable(5, 2)
    words = torch.tensor([1, 2])
    first = table(words, words)
    with pytest.raises(AssertionError, match="have not been taken"):
        table(words.clone(), words.clone())
    second = table(words, words)  # another group of the same step
    (first.sum() + 2 * second.sum()).backward()
    used = table.take_used()
    assert used is not None and used.values.grad is not None
    assert used.values.grad.tolist() == [[3, 3], [3, 3]]
    assert table.take_used() is None
    with torch.no_grad():
        table(words)
    table.eval()
    table(words)
    assert table.take_used() is None
