"""How far a run is, and how fast it goes."""

import math
from dataclasses import dataclass, fields
from typing import Any

from lm.system.clock import Clock

WARM_UP_STEPS = 3
"""First steps of a process, left out of its speed figures."""


@dataclass
class TrainingProgress:
    """How far a run is: plain numbers, saved with every checkpoint."""

    step: int = 0
    """Steps trained; the position in every stream follows from it (`lm.data.batches.Streams`)."""
    evaluated_step: int = 0
    last_perplexity: float = math.nan
    best_perplexity: float = math.inf
    best_step: int = 0
    train_seconds: float = 0.0
    eval_seconds: float = 0.0
    evaluated_at: float = 0.0
    """Training seconds at the last evaluation."""
    window_tokens: int = 0
    """Tokens since the last log."""
    logged_loss: float = math.inf
    """The training loss that was last logged."""
    evaluations_since_best: int = 0
    plateaus: int = 0
    """Times that the validation perplexity stopped falling; see `optim.schedule=plateau`."""
    plateau_length: int = 0
    """Evaluations since the best one, or since the last of these times."""

    @classmethod
    def restored(cls, values: dict[str, Any]) -> "TrainingProgress":
        """From what a checkpoint holds; a ValueError if these are not such numbers."""
        progress = cls(**values)
        for field in fields(cls):
            value = getattr(progress, field.name)
            if not isinstance(value, int if field.type is int else int | float) or value < 0:
                raise ValueError(field.name)
        return progress


class Speed:
    """Tokens and steps per second since the last log, without the first steps of the process."""

    def __init__(self) -> None:
        self._warm_up = WARM_UP_STEPS
        self._steps = self._tokens = 0
        self._since = 0.0

    def count(self, tokens: int, clock: Clock) -> None:
        if self._warm_up > 0:
            self._warm_up -= 1
            if self._warm_up == 0:
                clock.synchronise()
            self._since = clock.seconds
            return
        self._steps += 1
        self._tokens += tokens

    def figures(self, clock: Clock) -> dict[str, float]:
        """Called where the device has just been waited for, to read the loss."""
        seconds = clock.seconds - self._since
        if not self._steps or seconds <= 0:
            return {}
        figures = {
            "speed/tokens_per_s": self._tokens / seconds,
            "speed/step_ms": 1000 * seconds / self._steps,
        }
        self._steps = self._tokens = 0
        self._since = clock.seconds
        return figures
