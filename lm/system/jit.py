"""Functions that numba compiles, and keeps compiled where it can."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile when first called, without holding Python's lock while it runs.

    The machine code is kept beside the source or in the user's cache folder. Where neither can be written numba
    refuses to keep it; then every process compiles anew, which takes a second or two.
    """
    try:
        return cast(Function, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:
        return cast(Function, numba.njit(nogil=True)(function))


def inlined(function: Function) -> Function:
    """Copied into the compiled functions that call it: for calls so frequent that passing arrays to them costs time."""
    return cast(Function, numba.njit(inline="always")(function))
