"""Schedules versus their closed forms, standalone and in a trainer."""

import math
from collections.abc import Callable
from typing import get_args

import pytest

from lm.config.groups import OptimConfig, Schedule
from lm.config.schema import TrainConfig
from lm.data.corpus import open_corpus
from lm.optim.schedule import learning_rate
from tests.helpers.training import make_trainer

Tiny = Callable[..., TrainConfig]


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
