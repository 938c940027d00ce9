"""Time spent on one kind of work, summed over pauses and resumed runs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """A stopwatch for work on a device; starting and stopping wait for queued work."""

    def __init__(self, device: torch.device, *, seconds: float = 0.0) -> None:
        self.device = device
        self._total = seconds
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Host time so far; does not wait for the device."""
        return self._total + (time.monotonic() - self._since if self._since is not None else 0.0)

    def start(self) -> None:
        self.synchronise()
        self._since = time.monotonic()

    def stop(self) -> None:
        self.synchronise()
        self._total, self._since = self.seconds, None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of a block."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time of a block."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
