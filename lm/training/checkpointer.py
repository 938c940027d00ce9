"""Save checkpoints: when, what, and in the background while training continues.

Training only waits for a copy in memory, which a thread writes to disk. The copy is as large as the weights and
optimizer state together. If less than twice that is free, training waits for the disk instead.
"""

import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lm.data.corpus import Corpus
from lm.output.clusters.choice import ClusterChoice
from lm.system import checkpoint
from lm.system.console import resume_command, say
from lm.system.interrupt import Stopped
from lm.system.memory import free_memory, num_bytes, return_freed_memory
from lm.system.tree import map_leaves
from lm.training.restore import pack_vocabulary
from lm.training.run_dir import RunDir
from lm.training.run_log import RunLog
from lm.training.trainer import Trainer


class Checkpointer:
    """Saves a trainer as last.pt and best.pt, and once more if Stopped is raised inside the context."""

    def __init__(
        self, run_dir: RunDir, trainer: Trainer, log: RunLog, *, corpus: Corpus, clusters: ClusterChoice | None
    ) -> None:
        self.run_dir, self.trainer, self.log = run_dir, trainer, log
        self.constant = {
            "config": asdict(trainer.config),
            "vocabulary": pack_vocabulary(corpus.vocabulary),
            "corpus": corpus.hashes(),
            "clusters": asdict(clusters) if clusters is not None else None,
        }
        self.writer = CheckpointWriter()
        self._saved_step = trainer.progress.step or -1
        self._saved_at = trainer.seconds

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
        if trainer.ranks.is_rank0:
            content = {**state, **self.constant, "metrics_position": self.log.flush()}
            self.writer.save(content, self.run_dir.last, also=self.run_dir.best if best else None)

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk."""
        self.writer.wait()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        try:
            if isinstance(error, Stopped):
                if self.trainer.progress.step != self._saved_step:
                    self.save()
                self.wait()
                self.trainer.ranks.barrier()  # a launcher kills the other ranks soon after the first has ended
                step, command = self.trainer.progress.step, resume_command(self.run_dir.path)
                say(f"Stopped and saved at step {step}. Continue with:\n  {command}")
        finally:
            self.writer.close()


class CheckpointWriter:
    """Saves in a background thread; the next `save` or `wait` raises its errors."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

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
        self._thread = threading.Thread(target=self._write, args=(copy, path, also), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last save is on disk; raise its error, if any, once."""
        self.close()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the last save, ignoring errors."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, content: dict[str, Any], path: Path, also: Path | None) -> None:
        try:
            checkpoint.save(content, path, also=also)
        except BaseException as error:
            self._error = error
        content.clear()
        return_freed_memory()
