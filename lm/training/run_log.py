"""Log a run: metrics on rank 0, numbers beside the progress bar, one line per evaluation."""

from dataclasses import asdict
from typing import Any

from lm.config.validate import flatten
from lm.model.language_model import count_parameters
from lm.model.scoring import Score
from lm.output.clusters.choice import ClusterChoice
from lm.system.console import duration, say
from lm.training.metrics import Metrics
from lm.training.report import on_first_tokens
from lm.training.run_dir import RunDir
from lm.training.trainer import Trainer


class RunLog:
    """Writes a trainer's metrics to its run directory. Ranks other than 0 write nothing."""

    def __init__(
        self, run_dir: RunDir, trainer: Trainer, *, clusters: ClusterChoice | None, saved: dict[str, Any] | None
    ) -> None:
        self.trainer = trainer
        self.metrics: Metrics | None = None
        if trainer.ranks.is_rank0:
            position = int(saved["metrics_position"]) if saved is not None else 0
            texts = {"clusters": clusters.as_markdown()} if clusters is not None else {}
            settings = flatten(asdict(trainer.config))
            self.metrics = Metrics(run_dir.path, position=position, settings=settings, texts=texts)

    def write(self, values: dict[str, Any]) -> None:
        """Record values at the current step."""
        if self.metrics is not None:
            self.metrics.write({**self.trainer.position(), **values})

    def training(self, values: dict[str, float]) -> dict[str, str]:
        """Record training metrics; return those to show beside the progress bar."""
        self.write(values)
        trainer = self.trainer
        shown = {
            "epoch": str(trainer.epoch + 1),
            "loss": f"{values['train/loss']:.3f}",
            "ppl": f"{values['train/ppl']:.1f}",
        }
        if (speed := values.get("speed/tokens_per_s")) is not None:
            shown["tok/s"] = f"{speed:,.0f}"
        if (limit := trainer.config.trainer.max_seconds) is not None:
            shown["seconds left"] = duration(max(0.0, limit - trainer.seconds))
        return shown

    def evaluation(self, score: Score, *, is_best: bool) -> None:
        """Record and print a validation score."""
        trainer = self.trainer
        values = {"valid/loss": score.loss, "valid/ppl": score.perplexity}
        values |= {"valid/ppl_without_unk": score.perplexity_without_unk, **score.by_cluster()}
        self.write({"parameters": count_parameters(trainer.model), **values})
        say(
            f"epoch {trainer.epochs:.2f}  step {trainer.progress.step}  "
            f"valid ppl {score.perplexity:.2f}{on_first_tokens(trainer, score)}{'  (best)' if is_best else ''}"
        )

    def finish(self) -> None:
        """Mark the run as finished."""
        if self.metrics is not None:
            self.metrics.finish()

    def flush(self) -> int:
        """Flush to disk; return the position up to which metrics.jsonl is safe."""
        return self.metrics.flush() if self.metrics is not None else 0

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_: object) -> None:
        if self.metrics is not None:
            self.metrics.close()
