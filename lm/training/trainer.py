"""The loop: truncated back-propagation through time, and when to log, evaluate, save and stop.

The training step never synchronises with the GPU; the loss is summed there and read when it is logged.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch

from lm.config.schema import TrainConfig, TrainerConfig
from lm.data.batches import Batch, BatchLoader, Streams
from lm.model.base import DropoutMasks
from lm.model.language_model import LanguageModel, count_parameters
from lm.model.scoring import Score, perplexity
from lm.optim.optimizer import build_optimizer
from lm.optim.schedule import learning_rate
from lm.system.clock import Clock
from lm.system.console import Progress, duration, say
from lm.system.errors import UserError
from lm.system.interrupt import Stopped, StopRequest
from lm.system.memory import GIB, forget_peak, peak_memory
from lm.system.ranks import Ranks
from lm.system.tree import map_leaves
from lm.training.averaging import WeightAverage
from lm.training.metrics import Metrics
from lm.training.profiling import StepProfiler
from lm.training.progress import Speed, TrainingProgress
from lm.training.step import ForwardBackward

DIVERGED = 2
"""Times the loss of a uniform guess from which on a run counts as lost; untrained models are at about 1."""
SOUND_LR = 0.1
"""The largest learning rate that is suggested instead of one that diverged."""


class Trainer:
    """Trains a model on streams until a limit is reached; whoever builds it says how to `save` and to `evaluate`.

    With several ranks each trains on its own streams, and everything but their states is the same on all of them.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        streams: Streams,
        config: TrainConfig,
        progress: TrainingProgress | None = None,
        metrics: Metrics | None = None,
        evaluate: Callable[[], Score | None] | None = None,
        save: Callable[["Trainer", bool], None] = lambda _trainer, _best: None,
        stop: StopRequest | None = None,
        ranks: Ranks | None = None,
        profiler: StepProfiler | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        self.optimizer = build_optimizer(model, config.optim, ranks=self.ranks)
        self.columns = self.ranks.columns(config.trainer.batch_size, groups=config.trainer.micro_batches)
        self.forward_backward = ForwardBackward(model, precision=config.trainer.precision, ranks=self.ranks)
        self.model, self.streams, self.config, self.metrics, self.profiler = model, streams, config, metrics, profiler
        self.progress = progress = TrainingProgress() if progress is None else progress
        self.stop = StopRequest() if stop is None else stop
        self._evaluate, self._save = evaluate, save
        keep = config.trainer.average
        self.average = WeightAverage(model, keep=keep) if keep is not None else None
        self.device = model.device
        self.planned_steps = planned_steps(config.trainer, streams)
        self.state = model.core.initial_state(self.columns.stop - self.columns.start, device=self.device)
        """Of this rank's streams."""
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        """Loss times tokens since the last log, over all ranks."""
        self.train_clock = Clock(self.device, seconds=progress.train_seconds)
        self.eval_clock = Clock(self.device, seconds=progress.eval_seconds)
        self.seconds = self._saved_at = progress.train_seconds
        """Training seconds by which decisions go: this process's clock, or what the ranks agreed on."""
        self._saved_step = progress.step if progress.step else -1
        self._speed = Speed()

    # ---- one step ------------------------------------------------------------------------------------------------

    def loader(self) -> BatchLoader:
        """The batches of this rank's streams, from where the run is."""
        return BatchLoader(
            self.streams,
            self.model,
            seed=self.config.seed,
            start=self.progress.step,
            pin=self.device.type == "cuda",
            micro_batches=self.config.trainer.micro_batches,
            columns=self.columns,
        )

    def train_step(self, batch: Batch) -> None:
        """Loss, gradient, update, on one batch that is on the device already."""
        progress = self.progress
        masks = DropoutMasks(self.config.seed, progress.step, self.config.trainer.batch_size, self.columns)
        loss, self.state = self.forward_backward(batch, self.state, masks)
        self.ranks.mean(loss)
        self.optimizer.step(loss, lr=self.learning_rate, num_steps=len(batch.targets_TB))
        if self.average is not None:
            self.average.step()
        num_tokens = batch.num_tokens * self.ranks.size
        self.loss_sum += loss * num_tokens
        progress.step += 1
        progress.window_tokens += num_tokens

    # ---- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train until a limit; raises Stopped after saving if asked to stop."""
        config, progress = self.config.trainer, self.progress
        self.model.train()
        forget_peak(self.device)
        with (
            self.loader() as loader,
            self._progress_bar() as bar,
            self.profiler or nullcontext(),
            self.train_clock.running(),
        ):
            for batch in loader:
                evaluate = self._evaluation_due()
                if evaluate or self._save_due():
                    # A checkpoint follows every evaluation, so that figures and the weights behind them stay together.
                    with self.train_clock.paused():
                        self.save(best=evaluate and self._evaluate_now())
                if self.finished:
                    break
                self.train_step(batch.to(self.device))
                self._speed.count(batch.num_tokens * self.ranks.size, self.train_clock)
                bar.advance()
                if self.profiler is not None:
                    with self.train_clock.paused():
                        self.profiler = None if self.profiler.step() else self.profiler
                if progress.step % config.log_every_steps == 0:
                    self._log(bar)
                signal, seconds = self.ranks.agree(stop=self.stop.pending(), seconds=self.train_clock.seconds)
                self.seconds = max(self.seconds, seconds)  # ranks that have just met know of no time yet
                self._stop_if_asked(signal)
        self.ranks.last_agreement()

    @property
    def learning_rate(self) -> float:
        return learning_rate(
            self.config.optim,
            step=self.progress.step,
            epoch=self.epoch,
            max_epochs=self.config.trainer.max_epochs,
            done=self.done,
            plateaus=self.progress.plateaus,
        )

    @property
    def done(self) -> float:
        """The share of the run that is behind, by the limit that is nearest."""
        max_seconds = self.config.trainer.max_seconds
        by_steps = self.progress.step / self.planned_steps if self.planned_steps is not None else 0.0
        by_time = self.seconds / max_seconds if max_seconds is not None else 0.0
        return min(1.0, max(by_steps, by_time))

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self.progress.step // self.streams.steps_per_epoch

    @property
    def passes(self) -> float:
        """Epochs, parts of one included."""
        return self.tokens / (self.streams.length * len(self.streams.starts_B))

    @property
    def tokens(self) -> int:
        return self.streams.tokens_before(self.progress.step)

    @property
    def amounts(self) -> dict[str, int | float]:
        """What counts towards each limit, by the limit's key in `trainer`."""
        return {
            "max_epochs": self.epoch,
            "max_steps": self.progress.step,
            "max_tokens": self.tokens,
            "max_seconds": self.seconds,
            "patience": self.progress.evaluations_since_best,
        }

    @property
    def reached(self) -> dict[str, int | float]:
        """The limits at which the run ends now."""
        amounts = self.amounts
        limits = {key: getattr(self.config.trainer, key) for key in amounts}
        return {key: limit for key, limit in limits.items() if limit is not None and amounts[key] >= limit}

    @property
    def finished(self) -> bool:
        return bool(self.reached)

    def _progress_bar(self) -> Progress:
        return Progress(self.planned_steps, start=self.progress.step, label="train", unit="steps")

    # ---- now and then --------------------------------------------------------------------------------------------

    def _save_due(self) -> bool:
        step, config = self.progress.step, self.config.trainer
        if step == self._saved_step:
            return False
        return (
            step == 0
            or (config.save_every_steps is not None and step % config.save_every_steps == 0)
            or (config.save_every_seconds is not None and self.seconds - self._saved_at >= config.save_every_seconds)
        )

    def _evaluation_due(self) -> bool:
        progress, config = self.progress, self.config.trainer
        if self._evaluate is None or progress.step == progress.evaluated_step:
            return False
        return (
            progress.step % self.streams.steps_per_epoch == 0
            or (config.eval_every_steps is not None and progress.step % config.eval_every_steps == 0)
            or (
                config.eval_every_seconds is not None
                and self.seconds - progress.evaluated_at >= config.eval_every_seconds
            )
            or self.finished
        )

    def _evaluate_now(self) -> bool:
        """Score the validation split; whether it is the best so far."""
        assert self._evaluate is not None
        self._check_finite()
        progress = self.progress
        with self.eval_clock.running(), self.weights_to_judge():
            score = self._evaluate()
        if score is None:
            self._stop_if_asked(self.stop.pending())
        assert score is not None
        progress.evaluated_step, progress.evaluated_at = progress.step, self.seconds
        self._check_converging(score.loss, "validation")
        progress.last_perplexity = score.perplexity
        is_best = self._count_evaluation(score.perplexity)
        figures = {"valid/loss": score.loss, "valid/ppl": score.perplexity}
        figures |= {"valid/ppl_without_unk": score.perplexity_without_unk, **score.by_cluster()}
        self.write({"parameters": count_parameters(self.model), **figures})
        say(
            f"epoch {self.passes:.2f}  step {progress.step}  "
            f"valid ppl {score.perplexity:.2f}{'  (best)' if is_best else ''}"
        )
        return is_best

    def _count_evaluation(self, perplexity: float) -> bool:
        """What patience and plateaus go by; whether it is the best so far."""
        progress, config = self.progress, self.config.optim
        if perplexity < progress.best_perplexity:
            progress.best_perplexity, progress.best_step = perplexity, progress.step
            progress.evaluations_since_best = progress.plateau_length = 0
            return True
        progress.evaluations_since_best += 1
        progress.plateau_length += 1
        if progress.plateau_length >= config.plateau_patience:
            progress.plateaus += 1
            progress.plateau_length = 0
        return False

    @contextmanager
    def weights_to_judge(self) -> Iterator[None]:
        """While entered, the model has the weights that the run is evaluated by: nothing pending, or their average."""
        self.optimizer.apply_pending_decay()
        with self.average.in_place() if self.average is not None else nullcontext():
            yield

    def _log(self, bar: Progress) -> None:
        progress = self.progress
        self._check_finite()
        loss = (self.loss_sum / progress.window_tokens).item()
        if loss >= progress.logged_loss:  # a bad start may be made good as long as the loss falls
            self._check_converging(loss, "training")
        progress.logged_loss = loss
        self.loss_sum.zero_()
        progress.window_tokens = 0
        record = {
            "train/loss": loss,
            "train/ppl": perplexity(loss, 1),
            "optim/lr": self.optimizer.lr,
            "optim/grad_norm": self.optimizer.grad_norm.item(),
            "memory/peak_gib": peak_memory(self.device) / GIB,
            **self._speed.figures(self.train_clock),
        }
        self.write(record)
        figures = {"epoch": str(self.epoch + 1), "loss": f"{loss:.3f}", "ppl": f"{record['train/ppl']:.1f}"}
        if (speed := record.get("speed/tokens_per_s")) is not None:
            figures["tok/s"] = f"{speed:,.0f}"
        if (limit := self.config.trainer.max_seconds) is not None:
            figures["seconds left"] = duration(max(0.0, limit - self.seconds))
        bar.show(**figures)

    def write(self, figures: dict[str, Any]) -> None:
        """Record figures of this moment, once for all ranks."""
        if self.metrics is not None:
            self.metrics.write({**self.place(), **figures})

    def place(self) -> dict[str, Any]:
        """Where in the run a record was taken."""
        return {
            "step": self.progress.step,
            "epoch": self.epoch,
            "epochs": round(self.passes, 4),
            "tokens": self.tokens,
            "train_seconds": round(self.train_clock.seconds, 3),
            "eval_seconds": round(self.eval_clock.seconds, 3),
        }

    def save(self, *, best: bool = False) -> None:
        """Write a checkpoint, unless the weights are past saving."""
        self._check_finite()
        progress = self.progress
        self._saved_at, self._saved_step = self.seconds, progress.step
        progress.train_seconds, progress.eval_seconds = self.train_clock.seconds, self.eval_clock.seconds
        self._save(self, best)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, as tensors and plain values; collective: all ranks must call it."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average.state_dict() if self.average is not None else None,
            "state": map_leaves(self.ranks.gather_streams, self.state),
            "loss_sum": self.loss_sum,
            "progress": asdict(self.progress),
        }

    def load_state_dict(self, content: dict[str, Any]) -> None:
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        if self.average is not None:
            self.average.load_state_dict(content["average"])
        # Weights and optimizer are copied above; the state is only read, so it may stay mapped from the file.
        self.state = map_leaves(lambda part: part[:, self.columns].to(self.device), content["state"])
        self.loss_sum.copy_(content["loss_sum"])

    def _stop_if_asked(self, signal: int) -> None:
        if signal:
            self.stop.signal = self.stop.signal or signal  # where another rank was asked
            self.save()
            raise Stopped(128 + signal)

    def _check_finite(self) -> None:
        bad_step = int(self.optimizer.bad_step)
        if bad_step >= 0:
            raise self._diverged(f"the loss or its gradient stopped being a finite number at step {bad_step}")

    def _check_converging(self, loss: float, kind: str) -> None:
        """A finite loss may be past recovery too: no sound model is far worse than guessing."""
        uniform = math.log(self.model.output.vocab_size)
        if loss > DIVERGED * uniform:
            raise self._diverged(
                f"the {kind} loss is {loss:.4g} at step {self.progress.step}; a uniform guess over the vocabulary has "
                f"{uniform:.3g}"
            )

    def _diverged(self, what: str) -> UserError:
        lr, clip = self.config.optim.lr, self.config.optim.max_grad_norm
        return UserError(
            f"Training diverged: {what}, with optim.lr={lr:g} and optim.max_grad_norm={clip}. Start a new run with a "
            f"lower optim.lr (try optim.lr={min(lr / 4, SOUND_LR):g}) or a lower optim.max_grad_norm; checkpoints "
            "written before are kept."
        )


def planned_steps(limits: TrainerConfig, streams: Streams) -> int | None:
    """The step at which a run ends; None where only its seconds are limited."""
    totals = [limits.max_steps, limits.max_epochs and limits.max_epochs * streams.steps_per_epoch]
    if limits.max_tokens is not None:
        epochs, rest = divmod(limits.max_tokens, streams.tokens_before(streams.steps_per_epoch))
        totals.append(epochs * streams.steps_per_epoch + math.ceil(rest / (limits.batch_size * limits.bptt)))
    return min((t for t in totals if t is not None), default=None)
