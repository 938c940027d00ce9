"""The suggested command to continue a finished run."""

from collections.abc import Callable

import pytest

from lm.config.schema import TrainConfig
from lm.data.corpus import open_corpus
from lm.training.report import _further
from tests.helpers.training import make_trainer


@pytest.mark.parametrize(
    ("limits", "steps", "further"),
    [
        ("trainer.max_steps=40", 40, "trainer.max_steps=80"),
        ("trainer.max_steps=30", 110, "trainer.max_steps=120"),
        ("trainer.max_steps=30", 60, "trainer.max_steps=120"),
        ("trainer.max_steps=null trainer.max_tokens=4000000", 200_000, "trainer.max_tokens=8000000"),
        ("trainer.max_steps=null trainer.max_epochs=5 optim.schedule=halve_after_half", 500, None),
        ("trainer.max_steps=40 optim.schedule=linear", 40, None),
    ],
)
def test_finished_run_suggests_how_to_continue(
    tiny: Callable[..., TrainConfig], limits: str, steps: int, further: str | None
) -> None:
    config = tiny(*limits.split())
    trainer, _ = make_trainer(config, open_corpus(config.data), num_batches=1)
    trainer.progress.step = steps
    assert _further(trainer) == further
