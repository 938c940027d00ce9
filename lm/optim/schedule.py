"""Learning-rate schedules.

- `constant`.
- `halve_after_half`: halved after each epoch in the second half of training.
- `plateau`: multiplied by `optim.plateau_factor` after `optim.plateau_patience` evaluations without improvement.
- `linear`, `cosine`: from `optim.lr` at the first step to zero at the limit that ends the run.

During warm-up, the rate of step n is multiplied by n / `optim.warmup_steps`.
"""

import math

from lm.config.groups import OptimConfig


def learning_rate(
    config: OptimConfig, *, step: int, epoch: int, max_epochs: int | None, done: float, plateaus: int = 0
) -> float:
    """Return a step's learning rate; `step` and `epoch` start at 0, `done` is the fraction of training completed."""
    warm_up = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    match config.schedule:
        case "constant":
            share = 1.0
        case "halve_after_half":
            assert max_epochs is not None
            # With 10 epochs, the sixth is the first with a halved rate.
            share = 0.5 ** max(0, epoch + 1 - -(-max_epochs // 2))
        case "plateau":
            share = config.plateau_factor**plateaus
        case "linear":
            share = 1 - done
        case "cosine":
            share = (1 + math.cos(math.pi * done)) / 2
    return config.lr * warm_up * share
