"""Measure free and peak memory, count the memory of fake tensors, and configure malloc."""

import contextlib
import ctypes
import os
import resource
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lm.system.errors import UserError, is_shortage
from lm.system.tree import leaves

GIB = 1 << 30
PEAK_RESET = Path("/proc/self/clear_refs")
"""Writing 5 to this file resets the process's peak."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
"""Options of glibc's mallopt."""
LSTM_WORKSPACE = 15
"""Values per cell and token that oneDNN's LSTM keeps for the backward pass (measured)."""


def size_of(size: float) -> str:
    """Format bytes for display."""
    return f"{size / GIB:,.1f} GiB" if size >= 0.1 * GIB else f"{size / (1 << 20):,.1f} MiB"


def num_bytes(tree: Any) -> int:
    """Sum the sizes of all tensors in nested containers."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree) if isinstance(leaf, Tensor))


def keep_freed_memory() -> None:
    """Keep freed memory in the process, as torch does on a GPU.

    By default glibc returns large blocks to the system, so every step maps and clears their pages again.
    """
    set_malloc(M_MMAP_MAX, 0)
    set_malloc(M_TRIM_THRESHOLD, (1 << 31) - 1)


def set_malloc(option: int, value: int) -> None:
    """Set an option of glibc's malloc; does nothing with other C libraries."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(option, value)


def return_freed_memory() -> None:
    """Return freed memory to the system."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak, if the system allows it, after returning freed memory to the system."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    return_freed_memory()
    with contextlib.suppress(OSError):
        PEAK_RESET.write_text("5")


def peak_memory(device: torch.device) -> int:
    """Return peak GPU memory, or the process's peak on a CPU, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return resident("VmHWM")
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident(key: str) -> int:
    """Return this process's resident memory: `VmRSS` now, `VmHWM` at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1]) * 1024


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated, or None if unknown. Ranks on one machine share its memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    shared = min(filter(None, [_free_of_machine(), _free_of_groups()]), default=None)
    share = None if shared is None else shared // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(filter(None, [share, _free_of_process()]), default=None)


@contextlib.contextmanager
def explain_oom(device: torch.device, *, doing: str, advice: Callable[[], str]) -> Iterator[None]:
    """Convert out-of-memory errors into one paragraph that ends with `advice`."""
    try:
        yield
        return
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
    # Here, the error no longer keeps alive the frames that hold the memory.
    raise UserError(f"Out of memory on {device} while {doing}. {advice()} Saved checkpoints are kept.")


def smaller_batch(batch_size: int) -> str:
    """Suggest a setting after an evaluation has run out of memory."""
    if batch_size == 1:
        return "evaluate.batch_size is 1 already. Try another device."
    return f"Try evaluate.batch_size={max(1, batch_size // 4)} instead of {batch_size}; the results stay the same."


def _free_of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return (kib["MemAvailable"] + kib.get("SwapFree", 0)) * 1024


def _free_of_groups() -> int | None:
    """Return the smallest amount of memory left by the cgroups of a container or cluster job."""
    try:
        return _free_below(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup").read_text())
    except OSError:
        return None


def _free_below(root: Path, membership: str) -> int | None:
    own = next((line for line in membership.splitlines() if line.startswith("0::")), None)
    if own is None:
        return None
    group = root / own.removeprefix("0::").strip("/")
    groups = [group, *(parent for parent in group.parents if parent.is_relative_to(root))]
    return min(filter(None, map(_free_of_group, groups)), default=None)


def _free_of_group(group: Path) -> int | None:
    """Return the bytes left in a cgroup; cached file pages count as free."""
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        files = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return None if limit == "max" else max(1, int(limit) - used + int(files["inactive_file"]))
    except (OSError, ValueError, KeyError):
        return None


def _free_of_process() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return max(1, limit - pages * os.sysconf("SC_PAGE_SIZE"))


def has_data(tensor: Tensor) -> bool:
    """Whether a tensor has data; false for meta and fake tensors."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the memory of tensors created inside the context; `peak` is its maximum."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mkldnn_rnn_layer.default and isinstance(result[0], FakeTensor):
            output_TBH, *states, workspace = result  # torch reports no size for oneDNN's workspace
            result = (output_TBH, *states, workspace.new_empty(4 * LSTM_WORKSPACE * output_TBH.numel()))
        for leaf in leaves(result):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage()) not in self._seen:
                self._seen.add(storage)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._release, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _release(self, size: int) -> None:
        self.live -= size
