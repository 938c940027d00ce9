"""The names of the precisions, without importing torch."""

from enum import Enum


class Precision(Enum):
    """The precision of training's matrix products; see `lm.system.arithmetic`."""

    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"
