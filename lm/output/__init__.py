"""Output layers: one file each, one contract for all (`base.py`)."""

from typing import Any

from numpy.typing import NDArray

from lm.config import OutputConfig
from lm.output.base import OutputLayer
from lm.output.full import FullSoftmax


def build_output(config: OutputConfig, *, width: int, counts: NDArray[Any]) -> OutputLayer:  # noqa: ARG001
    """The layer that `output=NAME` names, over a vocabulary with these training counts."""
    return FullSoftmax(width=width, vocab_size=len(counts))
