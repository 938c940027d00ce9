"""CPU settings of a process, made before its first parallel operation, and other numbers of threads for a while."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
"""Options of glibc's mallopt."""


def prepare_processor(threads: int) -> None:
    """Set the number of threads, flush denormals on all of them, keep freed memory.

    Denormals, which a saturated softmax is full of, are many times slower than other numbers. Flushing them to zero is
    a per-thread setting that threads started later inherit. Freed memory is kept for the next step, as torch does on a
    GPU: by default large blocks return to the system at once, so every step maps and clears their pages again.
    """
    torch.set_flush_denormal(True)
    torch.set_num_threads(threads)
    set_malloc(M_MMAP_MAX, 0)
    set_malloc(M_TRIM_THRESHOLD, (1 << 31) - 1)


@contextmanager
def using_threads(number: int) -> Iterator[None]:
    """Another number of threads for what is inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def set_malloc(option: int, value: int) -> None:
    """Set an option of glibc's malloc; other C libraries have no `mallopt` and stay as they are."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(option, value)


def return_freed_memory() -> None:
    """Return freed memory to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
