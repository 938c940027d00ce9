"""What a run keeps: its log, and checkpoints, saved in the background while training continues.

Training only waits for a copy in memory, which a thread writes to disk. The copy is as large as the weights and
optimizer state together. If less than twice that is free, training waits for the disk instead.
"""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lm.config.validate import flatten
from lm.data.corpus import Corpus
from lm.model.language_model import count_parameters
from lm.model.scoring import Score
from lm.output.clusters.choice import ClusterChoice
from lm.system import checkpoint
from lm.system.console import duration, resume_command, say
from lm.system.interrupt import Stopped
from lm.system.memory import free_memory, num_bytes, return_freed_memory
from lm.system.tree import map_leaves
from lm.training.metrics import Metrics
from lm.training.report import on_first_tokens
from lm.training.restore import pack_vocabulary
from lm.training.run_dir import RunDir
from lm.training.trainer import Trainer


class RunWriter(AbstractContextManager["RunWriter"]):
    """Writes a trainer's metrics, last.pt and best.pt to its run directory. Ranks other than 0 write nothing.

    If Stopped is raised inside the context, the trainer is saved once more.
    """

    def __init__(
        self, run_dir: RunDir, trainer: Trainer, *, corpus: Corpus, clusters: ClusterChoice | None, position: int = 0
    ) -> None:
        """`position` is how much of metrics.jsonl a resumed run keeps."""
        self.run_dir, self.trainer, config = run_dir, trainer, asdict(trainer.config)
        self.constant = {
            "config": config,
            "vocabulary": pack_vocabulary(corpus.vocabulary),
            "corpus": corpus.hashes(),
            "clusters": asdict(clusters) if clusters is not None else None,
        }
        self.metrics: Metrics | None = None
        if trainer.ranks.is_rank0:
            self.metrics = Metrics(run_dir.path, position=position, settings=flatten(config))
        self.checkpoints = CheckpointWriter()
        self._saved_step = trainer.progress.step or -1
        self._saved_at = trainer.seconds

    def log(self, values: dict[str, Any]) -> None:
        """Record values at the current step."""
        if self.metrics is not None:
            self.metrics.write({**self.trainer.position(), **values})

    def log_training(self, values: dict[str, float]) -> dict[str, str]:
        """Record training metrics; return those to show beside the progress bar."""
        self.log(values)
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

    def log_evaluation(self, score: Score, *, is_best: bool) -> None:
        """Record and print a validation score."""
        trainer = self.trainer
        values = {"valid/loss": score.loss, "valid/ppl": score.perplexity}
        values |= {"valid/ppl_without_unk": score.perplexity_without_unk, **score.by_cluster()}
        self.log({"parameters": count_parameters(trainer.model), **values})
        say(
            f"epoch {trainer.epochs:.2f}  step {trainer.progress.step}  "
            f"valid ppl {score.perplexity:.2f}{on_first_tokens(trainer, score)}{'  (best)' if is_best else ''}"
        )

    def due(self) -> bool:
        """Whether `trainer.save_every_*` asks for a save before the next step; a new run is saved before step 1."""
        step, config = self.trainer.progress.step, self.trainer.config.trainer
        if step == self._saved_step:
            return False
        seconds = self.trainer.seconds - self._saved_at
        return (
            step == 0
            or (config.save_every_steps is not None and step % config.save_every_steps == 0)
            or (config.save_every_seconds is not None and seconds >= config.save_every_seconds)
        )

    def save(self, *, best: bool = False) -> None:
        """Write last.pt and, if `best`, best.pt. Collective; raises UserError instead of saving non-finite weights."""
        trainer = self.trainer
        trainer.check_finite()
        self._saved_at, self._saved_step = trainer.seconds, trainer.progress.step
        state = trainer.state_dict()
        if self.metrics is not None:
            content = {**state, **self.constant, "metrics_position": self.metrics.flush()}
            self.checkpoints.save(content, self.run_dir.last, also=self.run_dir.best if best else None)
            if self._saved_step == 0:  # a disk without space for it must fail before there are metrics to keep
                self.checkpoints.wait()

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        try:
            if isinstance(error, Stopped):
                if self.trainer.progress.step != self._saved_step:
                    self.save()
                self.checkpoints.wait()
                self.trainer.ranks.barrier()  # a launcher kills the other ranks soon after the first has ended
                step, command = self.trainer.progress.step, resume_command(self.run_dir.path)
                say(f"Stopped and saved at step {step}. Continue with:\n  {command}")
        finally:
            self.checkpoints.close()
            if self.metrics is not None:
                self.metrics.close()


class CheckpointWriter:
    """Saves in a background thread; the next `save` or `wait` raises its errors."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(self, content: dict[str, Any], path: Path, *, also: Path | None = None) -> None:
        """Like `checkpoint.save`, but return as soon as the content has been copied."""
        self.wait()
        free = free_memory(torch.device("cpu"))
        if free is not None and 2 * num_bytes(content) > free:
            checkpoint.save(content, path, also=also)
            return
        copy = map_leaves(
            lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf, content
        )
        self._pending = self._thread.submit(self._write, copy, path, also)

    def wait(self) -> None:
        """Wait until the last save is on disk; raise its error, if any, once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the last save, ignoring errors."""
        wait([self._pending] if self._pending is not None else [])

    @staticmethod
    def _write(content: dict[str, Any], path: Path, also: Path | None) -> None:
        try:
            checkpoint.save(content, path, also=also)
        finally:
            content.clear()
            return_freed_memory()
