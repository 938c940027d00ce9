"""The exception for user mistakes, and wording for other errors."""

import os


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
