"""The arithmetic of training: which products may be rounded, and where.

Only the products of the forward and backward pass are ever computed in less than float32. Weights, their gradients, the
optimizer, sums of losses and the state carried from step to step stay float32, and so does every evaluation, so that
figures of runs with different precisions are comparable.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from lm.system.errors import UserError
from lm.system.precision import Precision


def check_precision(precision: Precision, device: torch.device) -> None:
    """Refuse what the device cannot do."""
    if precision is Precision.bf16 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        raise UserError(
            f"trainer.precision=bf16 needs a GPU of compute capability 8.0 or higher; {device} is a "
            f"{torch.cuda.get_device_name(device)}. Try trainer.precision=fp32"
        )


def precision_name(precision: Precision, device: torch.device) -> str:
    """For the log: what is really computed. A run may be continued on another device, so TF32 is not refused there."""
    if precision is Precision.tf32 and device.type != "cuda":
        return "float32 (trainer.precision=tf32 is a mode of GPUs and changes nothing here)"
    return {
        Precision.fp32: "float32",
        Precision.tf32: "float32 with TF32 products",
        Precision.bf16: f"bfloat16 products{', TF32 in the LSTM' if device.type == 'cuda' else ''}, float32 weights",
    }[precision]


def forward_pass(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Products inside are in bfloat16 if the precision says so; the meta device knows no autocast."""
    if precision is not Precision.bf16 or not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def lstm_pass(device: torch.device) -> AbstractContextManager[object]:
    """Autocast has cuDNN compute LSTMs in float16, whatever it is asked for, so there they stay out of it."""
    return torch.autocast("cuda", enabled=False) if device.type == "cuda" else nullcontext()


def exact_products() -> None:
    """Float32 products are float32 from here on; torch's own default rounds an LSTM's to TF32 on a GPU."""
    _round_to_tf32(products=False, lstm=False)


@contextmanager
def training_products(precision: Precision) -> Iterator[None]:
    """Float32 products inside may be TF32 ones if the precision says so; unlike autocast, backward passes obey too.

    With bfloat16 those of the LSTM may, see `lstm_pass`.
    """
    _round_to_tf32(products=precision is Precision.tf32, lstm=precision is not Precision.fp32)
    try:
        yield
    finally:
        exact_products()


def _round_to_tf32(*, products: bool, lstm: bool) -> None:
    torch.set_float32_matmul_precision("high" if products else "highest")
    torch.backends.cudnn.allow_tf32 = lstm
