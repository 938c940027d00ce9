"""The device of a command, its CPU threads, and a clock that waits for queued device work."""

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lm.system.errors import UserError
from lm.system.memory import keep_freed_memory
from lm.system.ranks import Ranks


def pick_device(name: str, *, key: str, ranks: Ranks | None = None) -> torch.device:
    """Return the device named by the setting `key`; `auto` prefers the GPU. Each rank gets a GPU of its node."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if ranks is not None and ranks.size > 1 and device.type == "cuda":
        if ":" in name:
            raise UserError(f"{key} must not name one GPU for several ranks; got {name}. Try {key}=auto.")
        device = torch.device("cuda", ranks.local_rank)
        if ranks.local_rank >= (count := torch.cuda.device_count()) > 0:
            local = os.environ.get("LOCAL_WORLD_SIZE", "more")
            raise UserError(f"This node has {local} ranks but {count} GPU(s). Try torchrun --nproc-per-node={count}.")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise UserError(f"{key}={device} is not available: {explain_missing_gpu()}, or {key}=auto.")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # events and streams belong to the current GPU
    return device


def device_name(device: torch.device) -> str:
    """Describe a device: the GPU's model, or the CPU's number of threads."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    threads = torch.get_num_threads()
    return f"{device} ({threads} thread{'s' if threads > 1 else ''}, {platform.machine()})"


def explain_missing_gpu() -> str:
    """Explain why no GPU is available and what to try."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} CUDA devices are visible. Try another number"
    if torch.version.cuda is None:
        return "no CUDA device is visible to this torch, which is built without CUDA. Try a CUDA build of it"
    return (
        f"no CUDA device is visible. torch is built for CUDA {torch.version.cuda}; the driver may be too old for it or "
        "the container was started without its GPUs. Try nvidia-smi, docker run --gpus all"
    )


def prepare_cpu(threads: int) -> None:
    """Set the number of CPU threads, flush denormals on all of them, and keep freed memory for the next step.

    Call before the first parallel operation: flushing is a per-thread setting that threads started later inherit.
    Denormals, frequent in a saturated softmax, are many times slower than other numbers.
    """
    torch.set_flush_denormal(True)
    torch.set_num_threads(threads)
    keep_freed_memory()


@contextmanager
def using_threads(number: int) -> Iterator[None]:
    """Use another number of CPU threads inside the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Clock:
    """A stopwatch that can be paused and resumed; starting and stopping wait for queued device work."""

    def __init__(self, device: torch.device, *, seconds: float = 0.0) -> None:
        self.device = device
        self._total = seconds
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Host time so far; does not wait for the device."""
        return self._total + (time.monotonic() - self._since if self._since is not None else 0.0)

    def start(self) -> None:
        self.synchronize()
        self._since = time.monotonic()

    def stop(self) -> None:
        self.synchronize()
        self._total, self._since = self.seconds, None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time spent inside the context."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent inside the context."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
