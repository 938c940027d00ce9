"""The device of a command, its CPU threads, a clock that waits for queued device work, and training precision."""

import os
import platform
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch

from lm.system.errors import UserError
from lm.system.memory import keep_freed_memory
from lm.system.ranks import Ranks


def pick_device(name: str, *, key: str, ranks: Ranks | None = None) -> torch.device:
    """Return the device named by the setting `key`; `auto` prefers the GPU. Each rank gets a GPU of its node."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if ranks is not None and ranks.size > 1 and device.type == "cuda":
        if ":" in name:
            raise UserError(f"{key} must not name one GPU for several ranks; got {name}. Try {key}=auto.")
        device = torch.device("cuda", ranks.local_rank)
        if ranks.local_rank >= (count := torch.cuda.device_count()) > 0:
            local = os.environ.get("LOCAL_WORLD_SIZE", "more")
            raise UserError(f"This node has {local} ranks but {count} GPU(s). Try torchrun --nproc-per-node={count}.")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise UserError(f"{key}={device} is not available: {explain_missing_gpu()}, or {key}=auto.")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # events and streams belong to the current GPU
    return device


def device_name(device: torch.device) -> str:
    """Describe a device: the GPU's model, or the CPU's number of threads."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    threads = torch.get_num_threads()
    return f"{device} ({threads} thread{'s' if threads > 1 else ''}, {platform.machine()})"


def explain_missing_gpu() -> str:
    """Explain why no GPU is available and what to try."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} CUDA devices are visible. Try another number"
    if torch.version.cuda is None:
        return "no CUDA device is visible to this torch, which is built without CUDA. Try a CUDA build of it"
    return (
        f"no CUDA device is visible. torch is built for CUDA {torch.version.cuda}; the driver may be too old for it or "
        "the container was started without its GPUs. Try nvidia-smi, docker run --gpus all"
    )


def prepare_cpu(threads: int) -> None:
    """Set the number of CPU threads, flush denormals on all of them, and keep freed memory for the next step.

    Call before the first parallel operation: flushing is a per-thread setting that threads started later inherit.
    Denormals, frequent in a saturated softmax, are many times slower than other numbers.
    """
    torch.set_flush_denormal(True)
    torch.set_num_threads(threads)
    keep_freed_memory()


@contextmanager
def using_threads(number: int) -> Iterator[None]:
    """Use another number of CPU threads inside the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Clock:
    """A stopwatch that can be paused and resumed; starting and stopping wait for queued device work."""

    def __init__(self, device: torch.device, *, seconds: float = 0.0) -> None:
        self.device = device
        self._total = seconds
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Host time so far; does not wait for the device."""
        return self._total + (time.monotonic() - self._since if self._since is not None else 0.0)

    def start(self) -> None:
        self.synchronize()
        self._since = time.monotonic()

    def stop(self) -> None:
        self.synchronize()
        self._total, self._since = self.seconds, None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time spent inside the context."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent inside the context."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


# ---- training precision: which matmuls may use less than float32 -----------------------------------------------------
#
# Weights, gradients, optimizer state, summed losses, the carried state and every evaluation stay float32, so runs with
# different precisions are comparable.


Precision = Literal["fp32", "tf32", "bf16"]
"""Matmul precision in the forward and backward passes of training."""


def check_precision(precision: Precision, device: torch.device) -> None:
    """Reject a precision that the device does not support."""
    if precision == "bf16" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        raise UserError(
            f"trainer.precision=bf16 needs a GPU of compute capability 8.0 or higher; {device} is a "
            f"{torch.cuda.get_device_name(device)}. Try trainer.precision=fp32."
        )


def precision_name(precision: Precision, device: torch.device) -> str:
    """Describe the effective precision. TF32 is allowed on a CPU, because a run may resume on another device."""
    has_tensor_cores = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if precision == "tf32" and not has_tensor_cores:
        return "float32 (trainer.precision=tf32 needs a GPU of compute capability 8.0 or higher; no effect here)"
    recurrent = ", TF32 in recurrent layers" if device.type == "cuda" and not has_narrow_cudnn() else ""
    return {
        "fp32": f"float32{' (tensor cores unused; trainer=gpu enables bfloat16)' if has_tensor_cores else ''}",
        "tf32": "float32 with TF32 products",
        "bf16": f"bfloat16 products{recurrent}, float32 weights",
    }[precision]


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Autocast a forward pass to bfloat16 if that is the precision."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


def has_narrow_cudnn() -> bool:
    """Whether cuDNN has bfloat16 recurrent layers, as from version 9.13 on."""
    return (torch.backends.cudnn.version() or 0) >= 91300  # type: ignore[no-untyped-call]


def recurrent_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Dtype of recurrent layers on a GPU: autocast's if cuDNN supports it, else the tensor's or float32."""
    if torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda") if has_narrow_cudnn() else torch.float32
    return tensor.dtype


def disable_tf32() -> None:
    """Compute every matmul in full float32 from here on; by default torch uses TF32 for LSTMs on a GPU."""
    _allow_tf32(matmul=False, lstm=False)


@contextmanager
def matmul_precision(precision: Precision) -> Iterator[None]:
    """Allow TF32 inside if the precision permits it, in backward passes too. With bfloat16 only LSTMs use it."""
    _allow_tf32(matmul=precision == "tf32", lstm=precision != "fp32")
    try:
        yield
    finally:
        disable_tf32()


def _allow_tf32(*, matmul: bool, lstm: bool) -> None:
    torch.set_float32_matmul_precision("high" if matmul else "highest")
    torch.backends.cudnn.allow_tf32 = lstm
