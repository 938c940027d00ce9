"""The one exception for mistakes a user can mend, errors in words, and how to know a shortage of memory."""


class UserError(Exception):
    """A user's mistake, told in one clear paragraph that names key, value, rule and fix.

    The command line prints the message without a traceback and exits with code 2. Anything else that is raised is
    a bug of ours and keeps its traceback.
    """

    report_here: bool | None = None
    """Of several ranks: whether this one is to tell it; None leaves it to the first, as all find the same."""


def is_shortage(error: BaseException) -> bool:
    """Whether an error is one of the forms in which Python and torch say that memory has run out."""
    told = ("out of memory", "can't allocate memory", "ALLOC_FAILED")  # CUDA, the CPU, CUDA's libraries
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(t in str(error) for t in told))


def in_words(error: Exception) -> str:
    """An error in one paragraph; a disk that is full or a file that cannot be had is told by the system's words."""
    if isinstance(error, OSError):
        about = f": {error.filename}" if error.filename else ""
        return f"{error.strerror or error}{about}. What was written before is whole; mend that and run again."
    return str(error)
