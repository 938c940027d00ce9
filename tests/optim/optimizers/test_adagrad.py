"""Adagrad's settings; its updates are compared with their definitions in tests/optim/test_optimizer.py."""

import re
from dataclasses import replace

import pytest

from lm.optim.optimizers.adagrad import AdagradConfig


@pytest.mark.parametrize(
    ("lr", "weight_decay", "accumulator_start"),
    [(0.1, 0.1, 1e-5), (1e23, 1e-6, 1e-5), (2, 0.5, 1e-5), (0.1, 1e-6, 1e-14)],
)
def test_too_much_decay_is_refused_and_what_is_suggested_is_accepted(
    lr: float, weight_decay: float, accumulator_start: float
) -> None:
    """Decay alone must not turn the sign of a weight."""
    config = AdagradConfig("adagrad", lr, weight_decay=weight_decay, accumulator_start=accumulator_start)
    (problem,) = config.problems()
    suggested = re.search(r"Try optim\.(lr|weight_decay)=(\S+)$", problem)
    assert suggested is not None
    assert not list(replace(config, **{suggested[1]: float(suggested[2])}).problems())
