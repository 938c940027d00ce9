"""Functions compiled by numba, with the machine code cached."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile at the first call; runs without the GIL.

    The machine code is cached beside the source or in the user's cache folder. If neither is writable, every process
    compiles again, which takes a second or two.
    """
    try:
        return cast(Function, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:
        return cast(Function, numba.njit(nogil=True)(function))


def inlined(function: Function) -> Function:
    """Inlined into the compiled functions that call it, for calls so frequent that passing arrays is slow."""
    return cast(Function, numba.njit(inline="always")(function))
