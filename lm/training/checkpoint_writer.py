"""Checkpoints written while training goes on: it waits only for a copy in memory, which a thread writes to disk.

The copy takes as much memory as weights and optimizer together, until it is written; if less than twice that
much memory is free, training waits for the disk instead. At most one write is under way.
"""

import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lm.system import checkpoint
from lm.system.memory import free_memory
from lm.system.processor import return_freed_memory
from lm.system.tree import leaves, map_leaves


class CheckpointWriter:
    """Saves in the background; what goes wrong there is raised by the next `save` or `wait`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, content: dict[str, Any], path: Path, *, also: Path | None = None) -> None:
        """As `checkpoint.save`, but back as soon as the content may change again."""
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
        """Until the last save is on disk."""
        self.close()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Let the last save end, however it does."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, content: dict[str, Any], path: Path, also: Path | None) -> None:
        try:
            checkpoint.save(content, path, also=also)
        except BaseException as error:  # raised where somebody waits for it
            self._error = error
        content.clear()
        return_freed_memory()


def num_bytes(content: Any) -> int:
    """Bytes of all tensors in the content."""
    return sum(leaf.nbytes for leaf in leaves(content) if isinstance(leaf, Tensor))
