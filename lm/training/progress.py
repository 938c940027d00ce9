"""Progress and speed of a run."""

import math
from dataclasses import dataclass, fields
from typing import Any

from lm.system.devices import Clock

WARM_UP_STEPS = 3
"""First steps of a process, excluded from speed measurements."""


@dataclass
class TrainingProgress:
    """A run's progress as plain numbers, saved with every checkpoint."""

    step: int = 0
    """Steps trained; determines the position in every stream (`lm.data.batches.Streams`)."""
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
    """Training loss at the last log."""
    evaluations_since_best: int = 0
    plateaus: int = 0
    """How often validation perplexity has plateaued; used by `optim.schedule=plateau`."""
    plateau_length: int = 0
    """Evaluations since the best one or the last plateau."""

    @classmethod
    def restored(cls, values: dict[str, Any]) -> "TrainingProgress":
        """Restore from a checkpoint; raises ValueError unless all values are valid numbers."""
        progress = cls(**values)
        for field in fields(cls):
            value = getattr(progress, field.name)
            if not isinstance(value, int if field.type is int else int | float) or value < 0:
                raise ValueError(field.name)
        return progress

    def update(self, perplexity: float, *, plateau_patience: int) -> bool:
        """Record a validation perplexity; return whether it is the best so far."""
        self.last_perplexity = perplexity
        if perplexity < self.best_perplexity:
            self.best_perplexity, self.best_step = perplexity, self.step
            self.evaluations_since_best = self.plateau_length = 0
            return True
        self.evaluations_since_best += 1
        self.plateau_length += 1
        if self.plateau_length >= plateau_patience:
            self.plateaus += 1
            self.plateau_length = 0
        return False


class Speed:
    """Tokens per second and time per step since the last log, excluding the first steps of the process."""

    def __init__(self) -> None:
        self._warm_up = WARM_UP_STEPS
        self._steps = self._tokens = 0
        self._since = 0.0

    def count(self, tokens: int, clock: Clock) -> None:
        if self._warm_up > 0:
            self._warm_up -= 1
            if self._warm_up == 0:
                clock.synchronize()
            self._since = clock.seconds
            return
        self._steps += 1
        self._tokens += tokens

    def metrics(self, clock: Clock) -> dict[str, float]:
        """Return the speed since the last call. First read a value from the device, which waits for queued steps."""
        seconds = clock.seconds - self._since
        if not self._steps or seconds <= 0:
            return {}
        metrics = {"speed/tokens_per_s": self._tokens / seconds, "speed/step_ms": 1000 * seconds / self._steps}
        self._steps = self._tokens = 0
        self._since = clock.seconds
        return metrics
