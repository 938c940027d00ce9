"""The precision of training.

Only matrix products of the forward and backward pass may use less than float32. Weights, gradients, optimizer, summed
losses, the carried state and every evaluation stay float32, so runs with different precisions are comparable.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from lm.system.errors import UserError
from lm.system.precision import Precision


def check_precision(precision: Precision, device: torch.device) -> None:
    """Reject a precision that the device does not support."""
    if precision is Precision.bf16 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        raise UserError(
            f"trainer.precision=bf16 needs a GPU of compute capability 8.0 or higher; {device} is a "
            f"{torch.cuda.get_device_name(device)}. Try trainer.precision=fp32"
        )


def precision_name(precision: Precision, device: torch.device) -> str:
    """What is computed in, for the log. TF32 is allowed on a CPU, because a run may continue on another device."""
    if precision is Precision.tf32 and device.type != "cuda":
        return "float32 (trainer.precision=tf32 is a mode of GPUs and changes nothing here)"
    if precision is Precision.tf32 and torch.cuda.get_device_capability(device) < (8, 0):
        name = torch.cuda.get_device_name(device)
        return (
            f"float32 (trainer.precision=tf32 needs compute capability 8.0 or higher and changes nothing on a {name})"
        )
    return {
        Precision.fp32: "float32",
        Precision.tf32: "float32 with TF32 products",
        Precision.bf16: f"bfloat16 products{', TF32 in the LSTM' if device.type == 'cuda' else ''}, float32 weights",
    }[precision]


def forward_pass(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Autocast to bfloat16 if the precision says so; the meta device has no autocast."""
    if precision is not Precision.bf16 or not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def recurrent_pass(device: torch.device) -> AbstractContextManager[object]:
    """No autocast for recurrent layers on a GPU: it would make cuDNN use float16 instead of bfloat16."""
    return torch.autocast("cuda", enabled=False) if device.type == "cuda" else nullcontext()


def exact_products() -> None:
    """No TF32 from here on; torch's default uses it for LSTMs on a GPU."""
    _round_to_tf32(products=False, lstm=False)


@contextmanager
def training_products(precision: Precision) -> Iterator[None]:
    """Allow TF32 inside if the precision says so, in backward passes too. With bfloat16 only LSTMs use it."""
    _round_to_tf32(products=precision is Precision.tf32, lstm=precision is not Precision.fp32)
    try:
        yield
    finally:
        exact_products()


def _round_to_tf32(*, products: bool, lstm: bool) -> None:
    torch.set_float32_matmul_precision("high" if products else "highest")
    torch.backends.cudnn.allow_tf32 = lstm
