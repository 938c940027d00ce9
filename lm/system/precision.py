"""The names of the precisions; without torch, so that settings can be checked without it."""

from enum import Enum


class Precision(Enum):
    """How training computes its products; see `lm.system.arithmetic`."""

    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"
