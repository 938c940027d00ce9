"""Class-based hierarchical softmax with classes by frequency ("HSM (freq)" in section 5).

Each class holds about the same share of the square roots of the counts.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from lm.config.registry import plugin
from lm.output.base import LayerSizes
from lm.output.class_hierarchy import HierarchicalConfig, HierarchicalSoftmax


@dataclass
class FrequencyConfig(HierarchicalConfig):
    """Hierarchical softmax with classes of equal frequency."""

    name: str = "hsm_freq"


@plugin("output", "hsm_freq", FrequencyConfig)
class FrequencySoftmax(HierarchicalSoftmax):
    """Words in a class have about the same count."""

    @classmethod
    def build(cls, settings: HierarchicalConfig, sizes: LayerSizes) -> Self:
        classes = frequency_classes(sizes.counts, num_classes=settings.classes_for(len(sizes.counts)))
        settings = replace(settings, num_classes=int(classes.max()) + 1)
        return super().build(settings, sizes._replace(classes=classes))


def frequency_classes(counts: NDArray[Any], *, num_classes: int) -> NDArray[np.int64]:
    """The class of each word, such that classes hold about equal shares of sqrt(count); empty ones are left out."""
    mass = np.sqrt(np.asarray(counts, dtype=np.float64))
    if not mass.any():
        mass = np.ones_like(mass)
    before = np.cumsum(mass) - mass
    raw = np.minimum(np.floor(num_classes * before / mass.sum()), num_classes - 1)
    return np.unique(raw, return_inverse=True)[1]
