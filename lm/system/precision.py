"""Training precision: which matmuls may use less than float32.

Weights, gradients, optimizer state, summed losses, the carried state and every evaluation stay float32, so runs with
different precisions are comparable.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch

from lm.system.errors import UserError

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
