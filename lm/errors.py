"""The one exception for mistakes a user can mend, and how to know a shortage of memory."""


class UserError(Exception):
    """A user's mistake, told in one clear paragraph that names key, value, rule and fix.

    The command line prints the message without a traceback and exits with code 2. Anything else that is raised is
    a bug of ours and keeps its traceback.
    """


def is_shortage(error: BaseException) -> bool:
    """Whether an error is one of the forms in which Python and torch say that memory has run out."""
    told = ("out of memory", "can't allocate memory", "ALLOC_FAILED")  # CUDA, the CPU, CUDA's libraries
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(t in str(error) for t in told))
