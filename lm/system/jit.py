"""Compile functions with numba and cache the machine code."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a function at its first call; it runs without the GIL.

    Machine code is cached next to the source or in the user's cache folder. If neither is writable, every process
    compiles again, which takes a second or two.
    """
    try:
        return cast(Function, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:
        return cast(Function, numba.njit(nogil=True)(function))


def inlined(function: Function) -> Function:
    """Inline a function into its compiled callers, for calls so frequent that passing arrays is slow."""
    return cast(Function, numba.njit(inline="always")(function))
