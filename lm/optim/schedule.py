"""How the learning rate changes in the course of a run.

- `constant`.
- `halve_after_half`: halved after each epoch from the middle one on.
- `plateau`: multiplied by `optim.plateau_factor` each time that `optim.plateau_patience` evaluations in a row brought
  no better perplexity.
- `linear`, `cosine`: from `optim.lr` at the first step to zero at the limit that ends the run.

With each, during warm-up, step n has n / `optim.warmup_steps` of the rate.
"""

import math

from lm.config.groups import OptimConfig, Schedule


def learning_rate(
    config: OptimConfig, *, step: int, epoch: int, max_epochs: int | None, done: float, plateaus: int = 0
) -> float:
    """The learning rate of a step in an epoch, both counted from 0, when the share `done` of the run is behind it."""
    warm_up = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    match config.schedule:
        case Schedule.constant:
            share = 1.0
        case Schedule.halve_after_half:
            assert max_epochs is not None
            # Of 10 epochs, the sixth is the first to be halved.
            share = 0.5 ** max(0, epoch + 1 - -(-max_epochs // 2))
        case Schedule.plateau:
            share = config.plateau_factor**plateaus
        case Schedule.linear:
            share = 1 - done
        case Schedule.cosine:
            share = (1 + math.cos(math.pi * done)) / 2
    return config.lr * warm_up * share
