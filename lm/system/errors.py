"""Users' mistakes, the wording of other errors, and the edge of every command."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

from lm.system.console import printable
from lm.system.interrupt import Stopped, ctrl_c_ends


class UserError(Exception):
    """A user's mistake, described in one paragraph: key, value, rule and fix.

    The command line prints it without a traceback and exits with code 2. Other exceptions are bugs and keep theirs.
    """

    report_here: bool | None = None
    """Whether this rank prints the error; None means rank 0 does."""


class SweepError(UserError):
    """Some runs of a sweep failed; the exit code is 1."""


def is_shortage(error: BaseException) -> bool:
    """Whether Python, torch or CUDA has run out of memory."""
    signs = ("out of memory", "can't allocate memory", "ALLOC_FAILED")  # CUDA, the CPU, CUDA's libraries
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    )


def in_words(error: Exception) -> str:
    """Describe an error in one paragraph, using the system's message for disk and file errors."""
    if isinstance(error, OSError):
        about = f": {os.fsdecode(error.filename)}" if isinstance(error.filename, str | bytes | os.PathLike) else ""
        return f"{error.strerror or error}{about}. Files written before are complete; fix that and run again."
    if is_shortage(error):
        return f"Out of memory ({(str(error) or 'no details').splitlines()[0]}). Try smaller sizes, or a smaller batch."
    return str(error)


BUG = "This is a bug in the program, not a mistake of yours. Please report it with the lines above."


@contextlib.contextmanager
def guarded(*, in_sweep: bool = False) -> Iterator[None]:
    """Exit with 2 on a user's mistake or an error of disk, file or memory, 130 on Ctrl-C, 141 if no one reads stdout.

    Other exceptions are bugs. They keep their traceback, and a line below it says so. In a sweep, mistakes are raised,
    because its other jobs continue.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    try:
        with ctrl_c_ends():
            try:
                yield
            except SystemExit:  # after --help
                sys.stdout.flush()
                raise
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        sys.exit(128 + signal.SIGPIPE)
    except Stopped as stopped:
        sys.exit(stopped.code)
    except Exception as error:
        if not isinstance(error, UserError | OSError) and not is_shortage(error):
            if BUG not in getattr(error, "__notes__", ()):
                error.add_note(BUG)
            raise
        if in_sweep:
            raise
        _report(error)
        _drop_output()
        sys.exit(1 if isinstance(error, SweepError) else 2)


def _report(error: Exception) -> None:
    """Print an error to stderr; if several ranks have the same error, only one prints it."""
    report_here = error.report_here if isinstance(error, UserError) else None
    is_rank0 = os.environ.get("RANK", "0") == "0" or os.environ.get("WORLD_SIZE", "1") == "1"
    if is_rank0 if report_here is None else report_here:
        with contextlib.suppress(OSError):
            print(printable(in_words(error), keep="\n"), file=sys.stderr)


def _drop_output() -> None:
    """Discard output that cannot be written, on which the interpreter's last flush would fail."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
