"""Ctrl-C, SIGTERM and SIGHUP: the first signal saves and ends a run, the second kills it."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn, Self

SAME_SIGNAL = 0.2
"""Seconds within which equal signals count as one; the kernel may send one per thread of a parent that dies."""


class Stopped(BaseException):
    """A run was stopped and has saved; holds the exit code (130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP).

    Not an Exception, so that a sweep ends with it instead of continuing with its next job.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class StopRequest:
    """Records the first stop signal inside the context; a second one ends the process."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, *, second_ends: bool = True) -> None:
        self.signal = 0
        """The first signal, or 0."""
        self.second_ends = second_ends
        self._received = 0.0
        self._before: dict[int, Any] = {}
        self._terminal = [number for number in (1, 2) if os.isatty(number)]  # a closed terminal is not a tty

    def __bool__(self) -> bool:
        return self.signal != 0

    def __enter__(self) -> Self:
        if _ctrl_c_pressed():
            raise KeyboardInterrupt
        heard = [number for number in self.SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup
        self._before = {number: signal.signal(number, self._on_signal) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: object) -> None:
        is_repeated = number == self.signal and time.monotonic() - self._received <= SAME_SIGNAL
        if self.signal and self.second_ends and not is_repeated:
            os._exit(128 + number)
        if number == signal.SIGHUP:  # writing to the closed terminal would be an error
            for descriptor in self._terminal:
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        self.signal, self._received = number, time.monotonic()


@contextlib.contextmanager
def ctrl_c_ends() -> Iterator[None]:
    """Make Ctrl-C exit with code 130 and no traceback outside a run; a second one exits immediately.

    The interpreter's normal shutdown is skipped: it can be interrupted, and torch's threads can abort it. A library
    may swallow the exception, or raise another one in its place.
    """
    handled = signal.getsignal(signal.SIGINT) is not signal.default_int_handler  # ignored, or by the caller
    if handled or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt) and not _ctrl_c_pressed():
            raise
        _end_interrupted()
    else:
        if _ctrl_c_pressed():
            _end_interrupted()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_interrupted() -> NoReturn:
    with contextlib.suppress(OSError):
        print("interrupted", file=sys.stderr)
        sys.stdout.flush()
    _quit()


def _ctrl_c_pressed() -> bool:
    """Whether Ctrl-C was pressed outside a run, even if a library's callback swallowed the exception."""
    return signal.getsignal(signal.SIGINT) is _quit


def _interrupt(_: int, frame: FrameType | None) -> NoReturn:
    """Raise KeyboardInterrupt; exit during an import, which has nothing to clean up and may abort in C++."""
    signal.signal(signal.SIGINT, _quit)
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            _end_interrupted()
        frame = frame.f_back
    raise KeyboardInterrupt


def _quit(*_: object) -> NoReturn:
    os._exit(128 + signal.SIGINT)


IN_SWEEP = "LM_IN_SWEEP"
"""Environment variable set for a sweep's runs."""


def in_sweep() -> bool:
    """Whether this process is a run of a sweep, which prints suggestions once for all of its runs."""
    return bool(os.environ.get(IN_SWEEP))


def end_with_launcher() -> None:
    """Ask the kernel to send SIGTERM to this process if its torchrun or sweep dies."""
    if not {"TORCHELASTIC_RUN_ID", IN_SWEEP} & os.environ.keys() or sys.platform != "linux":
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    parent = os.getppid()
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
    if os.getppid() != parent:  # the parent has just died
        os.kill(os.getpid(), signal.SIGTERM)
