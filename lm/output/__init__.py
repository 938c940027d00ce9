"""Output layers: one file each, one contract for all (`base.py`), one fused loss (`fused.py`)."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lm.config.model import (
    AdaptiveConfig,
    DSoftmaxConfig,
    DSoftmaxStarConfig,
    FullConfig,
    HierarchicalConfig,
    OutputConfig,
    SampledConfig,
)
from lm.data.plan import Plan
from lm.output.base import IGNORE_INDEX, OutputLayer
from lm.output.layers.adaptive import AdaptiveSoftmax
from lm.output.layers.dsoftmax import DSoftmax
from lm.output.layers.dsoftmax_star import DSoftmaxStar
from lm.output.layers.full import FullSoftmax
from lm.output.layers.hsm import HierarchicalSoftmax, default_num_classes, frequency_classes
from lm.output.layers.sampled import SampledSoftmax
from lm.system.errors import UserError

__all__ = [
    "IGNORE_INDEX",
    "AdaptiveSoftmax",
    "DSoftmax",
    "DSoftmaxStar",
    "FullSoftmax",
    "HierarchicalSoftmax",
    "OutputLayer",
    "Plan",
    "SampledSoftmax",
    "build_output",
]


def build_output(
    config: OutputConfig,
    *,
    width: int,
    counts: NDArray[Any],
    vocab_size: int | None = None,
    classes: NDArray[Any] | None = None,
    generator: torch.Generator | None = None,
) -> OutputLayer:
    """The layer that `output=NAME` names, over a vocabulary with these training counts.

    `classes` are the words' Brown classes, which `hsm_sim` needs for training; without them it can be loaded into.
    """
    counts = _check_counts(counts, vocab_size=vocab_size)
    layer = _build(config, width=width, counts=counts, classes=classes, generator=generator)
    layer.counts = counts
    return layer


def _build(
    config: OutputConfig,
    *,
    width: int,
    counts: NDArray[Any],
    classes: NDArray[Any] | None,
    generator: torch.Generator | None,
) -> OutputLayer:
    size, fused = len(counts), config.fused
    match config:
        case FullConfig():
            return FullSoftmax(width=width, vocab_size=size, fused=fused, generator=generator)
        case SampledConfig(sample_fraction=share):
            num_samples = max(1, round(share * size)) if share > 0 else 0
            return SampledSoftmax(width=width, counts=counts, num_samples=num_samples, fused=fused, generator=generator)
        case HierarchicalConfig():
            num_classes = config.num_classes or default_num_classes(size)
            if config.name == "hsm_freq":
                classes = frequency_classes(counts, num_classes=num_classes)
                num_classes = int(classes.max()) + 1
            return HierarchicalSoftmax(
                width=width,
                vocab_size=size,
                num_classes=num_classes,
                classes=classes,
                fused=fused,
                generator=generator,
            )
        case DSoftmaxConfig(cutoffs=cutoffs):
            return DSoftmax(width=width, vocab_size=size, cutoffs=cutoffs, fused=fused, generator=generator)
        case DSoftmaxStarConfig(cutoffs=cutoffs):
            return DSoftmaxStar(width=width, vocab_size=size, cutoffs=cutoffs, fused=fused, generator=generator)
        case AdaptiveConfig(cutoffs=cutoffs):
            return AdaptiveSoftmax(
                width=width,
                vocab_size=size,
                cutoffs=cutoffs,
                shortlist=config.shortlist,
                head_bias=config.head_bias,
                fused=fused,
                generator=generator,
            )
    raise AssertionError(f"no layer for {type(config).__name__}")


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
