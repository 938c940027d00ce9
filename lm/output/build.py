"""From settings to an output layer."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.config.groups import OutputConfig
from lm.config.registry import find_plugin
from lm.output.base import LayerSizes, OutputLayer
from lm.system.errors import UserError


def build_output(
    config: OutputConfig,
    *,
    width: int,
    counts: NDArray[Any],
    vocab_size: int | None = None,
    classes: NDArray[Any] | None = None,
) -> OutputLayer:
    """The layer that `output=NAME` names, over a vocabulary with these training counts."""
    counts = _check_counts(counts, vocab_size=vocab_size)
    kind: type[OutputLayer] = find_plugin("output", config.name).target
    layer = kind.build(config, LayerSizes(width, counts, classes))
    layer.counts = counts
    return layer


def _check_counts(counts: NDArray[Any], *, vocab_size: int | None) -> NDArray[Any]:
    counts = np.asarray(counts)
    if vocab_size is not None and len(counts) != vocab_size:
        raise UserError(
            f"the counts must hold one number for each of the {vocab_size} words of the vocabulary; got {len(counts)}."
        )
    if counts.ndim != 1 or not len(counts) or (counts < 0).any() or (np.diff(counts.astype(np.float64)) > 0).any():
        raise UserError(
            "the counts must be one or more non-negative numbers in decreasing order, as word ids are sorted by "
            f"count; got {np.array2string(counts.ravel(), threshold=6, edgeitems=3)}."
        )
    return counts
