"""Ctrl-C and SIGTERM: asked once, a run saves and ends; asked twice, it ends at once."""

import os
import signal
from types import FrameType, TracebackType
from typing import Any


class Stopped(BaseException):
    """A run was asked to stop and has saved; carries the exit code (130 for Ctrl-C, 143 for SIGTERM).

    Not an Exception, so that a sweep ends with it instead of going on to its next job.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class StopRequest:
    """While entered, remembers the first stop signal instead of dying of it; a second one ends the process."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, *, second_ends: bool = True) -> None:
        self.signal: int | None = None
        self.second_ends = second_ends
        self._before: dict[int, Any] = {}

    def pending(self) -> int:
        """The number of the signal that asks to stop; 0 while there is none."""
        return self.signal or 0

    def __bool__(self) -> bool:
        return self.pending() != 0

    @property
    def exit_code(self) -> int:
        assert self.signal is not None
        return 128 + self.signal

    def __enter__(self) -> "StopRequest":
        self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.signal is not None and self.second_ends:
            os._exit(128 + number)
        self.signal = number
