"""How a process sets itself up to compute on a CPU, once, before its first parallel operation."""

import ctypes

import torch

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Numbers of glibc's mallopt."""


def prepare_processor(threads: int) -> None:
    """Set the number of threads, flush denormals on all of them, keep freed memory.

    Numbers below 1e-38, of which a saturated softmax is full, take the processor many times as long as others.
    Flushing them to zero is a setting of each thread, which threads started later inherit: those of the first parallel
    operation, and the one that loads batches.
    """
    torch.set_flush_denormal(True)
    torch.set_num_threads(threads)
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Let the allocator keep what a step frees for the next one, as it does on a GPU.

    By default large blocks go back to the system at once, and each of their pages is cleared and mapped anew in every
    step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries than glibc are left as they are
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def return_freed_memory() -> None:
    """Give back what has been freed: after something large that a step does not need."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
