"""Predictions that only define the full distribution match an output layer's."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lm.config.schema import TrainConfig
from lm.model.predictor import HiddenPredictions, Predictions
from tests.helpers.models import small_model


class Whole(Predictions):
    """Predictions that only define the full distribution."""

    def __init__(self, log_probs: Tensor) -> None:
        self.log_probs = log_probs

    def at(self, steps_N: Tensor, streams_N: Tensor) -> "Whole":
        return Whole(self.log_probs[steps_N, streams_N])

    def nll(self, targets: Tensor) -> Tensor:
        return -self.log_probs.gather(-1, targets[..., None]).squeeze(-1)

    def log_prob(self) -> Tensor:
        return self.log_probs.clone()


SAMPLING: list[dict[str, float | int | None]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "exclude_id": 0},
    {"temperature": 0.6},
    {"top_k": 3},
    {"top_k": 100, "temperature": 1.7},
    {"top_p": 0.5},
    {"top_p": 0.8, "temperature": 0.7, "exclude_id": 1},
    {"top_k": 4, "top_p": 0.9},
    {"top_p": 1.0, "exclude_id": 0},
]


@pytest.mark.parametrize("options", SAMPLING, ids=str)
@torch.no_grad()
def test_default_predictions_match_output_layer(options: dict[str, float], tiny: Callable[..., TrainConfig]) -> None:
    model = small_model(tiny, "full")
    words_TB = torch.randint(0, model.vocab_size, (40, 5), generator=torch.Generator().manual_seed(0))
    predictions, _ = model.read(words_TB, model.initial_state(5))
    steps_N, streams_N = torch.arange(40).repeat(5), torch.arange(5).repeat_interleave(40)
    some = predictions.at(steps_N, streams_N)
    assert isinstance(some, HiddenPredictions)
    whole = Whole(predictions.log_prob()).at(steps_N, streams_N)
    uniform_N = torch.rand(200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn, expected = (p.sample(uniform_N, **options) for p in (whole, some))  # type: ignore[arg-type]
    assert drawn.tolist() == expected.tolist()
    for found, wanted in zip(whole.topk(3), some.topk(3), strict=True):
        torch.testing.assert_close(found, wanted)
