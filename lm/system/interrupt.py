"""Ctrl-C, SIGTERM, a closed terminal: asked once, a run saves and ends; asked twice, it ends at once."""

import ctypes
import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Any


class Stopped(BaseException):
    """A run was asked to stop and has saved; carries the exit code (130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP).

    Not an Exception, so that a sweep ends with it instead of going on to its next job.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class StopRequest:
    """While entered, remembers the first stop signal instead of dying of it; a second one ends the process."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, *, second_ends: bool = True) -> None:
        self.signal: int | None = None
        self.second_ends = second_ends
        self._before: dict[int, Any] = {}
        self._terminal = Terminal()

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
        heard = [number for number in self.SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup
        self._before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.signal is not None and self.second_ends:
            os._exit(128 + number)
        if number == signal.SIGHUP:
            self._terminal.leave()
        self.signal = number


def end_with_launcher() -> None:
    """Be told to stop when torchrun dies; a killed one would otherwise leave its workers running."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    parent = os.getppid()
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
    if os.getppid() != parent:  # it died just now
        os.kill(os.getpid(), signal.SIGTERM)


class Terminal:
    """The terminal that this process writes to, if it does."""

    def __init__(self) -> None:
        self._descriptors = [number for number in (1, 2) if os.isatty(number)]  # a closed one does not say so any more

    def leave(self) -> None:
        """Write to nowhere from here on: a terminal that was closed answers every progress bar with an error."""
        for descriptor in self._descriptors:
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
