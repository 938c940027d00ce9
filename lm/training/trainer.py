"""Train a model by truncated BPTT, and decide what is due after each step.

A step never synchronizes with the GPU: the loss is summed on the device and read when logged. The training
loop is in `lm.training.run`.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from lm.config.schema import TrainConfig, TrainerConfig
from lm.data.batches import Batch, BatchLoader, TrainingText, to_device
from lm.model.base import State
from lm.model.language_model import LanguageModel
from lm.model.regularization import DropoutMasks
from lm.model.scoring import Score, perplexity
from lm.optim.optimizer import build_optimizer, learning_rate
from lm.system.devices import Clock
from lm.system.errors import UserError
from lm.system.memory import GIB, peak_memory
from lm.system.ranks import Ranks
from lm.system.tree import map_leaves
from lm.training.averaging import WeightAverage
from lm.training.step import ForwardBackward

DIVERGED = 2
"""Abort if the loss exceeds this multiple of log(vocab_size), the loss of a uniform guess."""
SOUND_LR = 0.1
"""Largest learning rate to suggest after divergence."""


class Trainer:
    """A model with its optimizer, streams and progress: everything the next step depends on.

    Each rank trains on its own streams; all state except the hidden states is the same on every rank.
    """

    def __init__(
        self, model: LanguageModel, *, streams: TrainingText, config: TrainConfig, ranks: Ranks | None = None
    ) -> None:
        self.model, self.streams, self.config, self.ranks = model, streams, config, ranks or Ranks()
        self.device = model.device
        self.progress = TrainingProgress()
        self.optimizer = build_optimizer(model, config.optim, ranks=self.ranks)
        self.columns = self.ranks.columns(config.trainer.batch_size, groups=config.trainer.micro_batches)
        compress = config.trainer.ddp_compression == "bf16"
        self.forward_backward = ForwardBackward(
            model, precision=config.trainer.precision, ranks=self.ranks, compress=compress
        )
        average = config.trainer.average
        keep = None if average == "asgd" else average
        self.average = WeightAverage(model, keep=keep) if average is not None else None
        self.planned_steps = planned_steps(config.trainer, streams)
        self.state = self.initial_state()
        """Hidden state of this rank's streams."""
        self.loss_sum = torch.zeros(1 + model.num_penalties, dtype=torch.float64, device=self.device)
        """Loss and any penalty times tokens since the last log, over all ranks."""
        self.train_clock, self.eval_clock = Clock(self.device), Clock(self.device)
        self.seconds = 0.0
        """Training time used by limits and schedules; the same on all ranks."""
        self._speed = Speed()

    # ---- steps ---------------------------------------------------------------------------------------------------

    def batches(self) -> BatchLoader:
        """Load this rank's batches from the current step on, prefetching inside the context."""
        return BatchLoader(
            self.streams,
            self.model,
            seed=self.config.seed,
            start=self.progress.step,
            pin=self.device.type == "cuda",
            micro_batches=self.config.trainer.micro_batches,
            columns=self.columns,
        )

    def step(self, batch: Batch) -> None:
        """Forward, backward, update."""
        progress = self.progress
        batch = to_device(batch, self.device)
        state = self.initial_state() if batch.resets else self.state
        losses, self.state = self.forward_backward(batch, state, self.dropout_masks())
        self.ranks.mean(losses)
        # Padded or not, the objective sums over a stream's targets and averages over streams.
        num_steps = batch.num_tokens / self.config.trainer.batch_size
        self.optimizer.step(losses[0], lr=self.learning_rate, num_steps=num_steps)
        if self.average is not None:
            self.average.step()
        self.loss_sum += losses * batch.num_tokens
        progress.step += 1
        progress.window_tokens += batch.num_tokens
        self._speed.count(batch.num_tokens, self.train_clock)

    def initial_state(self) -> State:
        """Return the zero state of this rank's streams."""
        return self.model.core.initial_state(self.columns.stop - self.columns.start, device=self.device)

    def dropout_masks(self) -> DropoutMasks:
        """Return the masks of the next step, for this rank's streams."""
        config = self.config
        locked = config.model.locked_dropout
        return DropoutMasks(config.seed, self.progress.step, config.trainer.batch_size, self.columns, locked=locked)

    def agree(self, signal: int) -> int:
        """Exchange stop signals and training time between ranks; return the signal any rank received, or 0.

        With several ranks the result is one step old, so that no device waits for it.
        """
        signal, seconds = self.ranks.agree(stop=signal, seconds=self.train_clock.seconds)
        self.seconds = max(self.seconds, seconds)
        return signal

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return learning_rate(
            self.config.optim,
            step=self.progress.step,
            epoch=self.epoch,
            max_epochs=self.config.trainer.max_epochs,
            done=self.fraction_done,
            plateaus=self.progress.plateaus,
        )

    # ---- position and limits -------------------------------------------------------------------------------------

    @property
    def fraction_done(self) -> float:
        """Fraction of training completed, in [0, 1]."""
        max_seconds = self.config.trainer.max_seconds
        by_steps = self.progress.step / self.planned_steps if self.planned_steps is not None else 0.0
        by_time = self.seconds / max_seconds if max_seconds is not None else 0.0
        return min(1.0, max(by_steps, by_time))

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self.progress.step // self.streams.steps_per_epoch

    @property
    def epochs(self) -> float:
        """Epochs completed, including the fraction of the current one."""
        return self.tokens / self.streams.tokens_per_epoch

    @property
    def tokens(self) -> int:
        """Tokens trained on."""
        return self.streams.tokens_before(self.progress.step)

    def position(self) -> dict[str, Any]:
        """Return step, epochs, tokens and clocks, which every metrics record contains."""
        return {
            "step": self.progress.step,
            "epoch": self.epoch,
            "epochs": round(self.epochs, 4),
            "tokens": self.tokens,
            "train_seconds": round(self.train_clock.seconds, 3),
            "eval_seconds": round(self.eval_clock.seconds, 3),
        }

    @property
    def limits(self) -> dict[str, int | float]:
        """Current counts, by the key in `trainer` that limits them."""
        return {
            "max_epochs": self.epoch,
            "max_steps": self.progress.step,
            "max_tokens": self.tokens,
            "max_seconds": self.seconds,
            "patience": self.progress.evaluations_since_best,
        }

    @property
    def limits_reached(self) -> dict[str, int | float]:
        """The limits that have been reached, with their values."""
        counts = self.limits
        limits = {key: getattr(self.config.trainer, key) for key in counts}
        return {key: limit for key, limit in limits.items() if limit is not None and counts[key] >= limit}

    @property
    def finished(self) -> bool:
        return bool(self.limits_reached)

    # ---- logging and evaluation ----------------------------------------------------------------------------------

    def log_due(self) -> bool:
        return self.progress.step % self.config.trainer.log_every_steps == 0

    def metrics(self) -> dict[str, float]:
        """Return training metrics since the last call. Reads from the device; raises UserError after divergence."""
        progress = self.progress
        self.check_finite()
        loss, *penalty = (self.loss_sum / progress.window_tokens).tolist()
        if loss >= progress.logged_loss:  # a bad start is no divergence while the loss falls
            self._check_converging(loss, "training loss")
        progress.logged_loss = loss
        self.loss_sum.zero_()
        progress.window_tokens = 0
        return {
            "train/loss": loss,
            "train/ppl": perplexity(loss, 1),
            **({"train/penalty": penalty[0]} if penalty else {}),
            "optim/lr": self.optimizer.lr,
            "optim/grad_norm": self.optimizer.grad_norm.item(),
            "memory/peak_gib": peak_memory(self.device) / GIB,
            **self._speed.metrics(self.train_clock),
        }

    def evaluation_due(self) -> bool:
        progress, config = self.progress, self.config.trainer
        if progress.step == progress.evaluated_step:
            return False
        seconds = self.seconds - progress.evaluated_at
        return (
            progress.step % self.streams.steps_per_epoch == 0
            or (config.eval_every_steps is not None and progress.step % config.eval_every_steps == 0)
            or (config.eval_every_seconds is not None and seconds >= config.eval_every_seconds)
            or self.finished
        )

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Apply pending decay and, if enabled, swap in the averaged weights."""
        self.check_finite()
        self.optimizer.apply_pending_decay()
        with self.average.in_place() if self.average is not None else nullcontext():
            yield

    def record_evaluation(self, score: Score) -> bool:
        """Update best perplexity, patience and plateaus; return whether this score is the best so far."""
        progress = self.progress
        progress.evaluated_step, progress.evaluated_at = progress.step, self.seconds
        unknown = f" (of {score.oov_rate:.0%} unknown words: is it the right text?)" if score.oov_rate > 0.3 else ""
        self._check_converging(score.loss, f"validation loss{unknown}")
        if self.average is not None:
            self.average.record_evaluation(score.perplexity)
        return progress.update(score.perplexity, plateau_patience=self.config.optim.plateau_patience)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything the next step depends on. Collective: all ranks must call it."""
        progress = self.progress
        progress.train_seconds, progress.eval_seconds = self.train_clock.seconds, self.eval_clock.seconds
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average.state_dict() if self.average is not None else None,
            "state": map_leaves(self.ranks.gather_streams, self.state),
            "loss_sum": self.loss_sum,
            "progress": asdict(progress),
        }

    def load_state_dict(self, content: dict[str, Any]) -> None:
        self.progress = progress = TrainingProgress.restored(content["progress"])
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        if self.average is not None:
            self.average.load_state_dict(content["average"])
        # Weights and optimizer are copied above; the state is only read, so it may stay mapped from the file.
        self.state = map_leaves(lambda part: part[:, self.columns].to(self.device), content["state"])
        self.loss_sum.copy_(content["loss_sum"])
        self.train_clock = Clock(self.device, seconds=progress.train_seconds)
        self.eval_clock = Clock(self.device, seconds=progress.eval_seconds)
        self.seconds = progress.train_seconds

    # ---- divergence ----------------------------------------------------------------------------------------------

    def check_finite(self) -> None:
        """Raise UserError if a loss or gradient was not finite; weights are not updated after that."""
        bad_step = int(self.optimizer.bad_step)
        if bad_step >= 0:
            raise self._diverged(f"the loss or its gradient is not finite at step {bad_step}")

    def _check_converging(self, loss: float, kind: str) -> None:
        """Raise UserError if the loss is far above that of a uniform guess."""
        uniform = math.log(self.model.output.vocab_size)
        if loss > DIVERGED * uniform:
            raise self._diverged(
                f"the {kind} is {loss:.4g} at step {self.progress.step}; a uniform guess has {uniform:.3g}"
            )

    def _diverged(self, what: str) -> UserError:
        lr, clip = self.config.optim.lr, self.config.optim.max_grad_norm
        return UserError(
            f"Training diverged: {what}, with optim.lr={lr:g} and optim.max_grad_norm={clip}. Start a new run with a "
            f"lower optim.lr (try optim.lr={min(lr / 4, SOUND_LR):g}) or a lower optim.max_grad_norm. Earlier "
            "checkpoints are kept."
        )


def planned_steps(limits: TrainerConfig, streams: TrainingText) -> int | None:
    """Return the total number of steps, or None if only time limits the run."""
    totals = [limits.max_steps, limits.max_epochs and limits.max_epochs * streams.steps_per_epoch]
    if limits.max_tokens is not None:
        epochs, rest = divmod(limits.max_tokens, streams.tokens_per_epoch)
        totals.append(epochs * streams.steps_per_epoch + math.ceil(rest / (limits.batch_size * limits.bptt)))
    return min((t for t in totals if t is not None), default=None)


# ---- progress and speed ----------------------------------------------------------------------------------------------


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
            is_huge = isinstance(value, int) and value >> 53
            if not isinstance(value, int if field.type is int else int | float) or value < 0 or is_huge:
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
