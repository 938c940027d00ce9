"""The exact softmax over the whole vocabulary: one linear map without bias (section 3.3 of the paper).

Shapes: N tokens, D width, V words.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lm.config.groups import OutputConfig
from lm.config.registry import plugin
from lm.output.base import LayerSizes
from lm.output.joint import JointSoftmax


@dataclass
class FullConfig(OutputConfig):
    """Exact softmax over the whole vocabulary."""

    name: str = "full"
    takes_maxent = True


@plugin("output", "full", FullConfig)
class FullSoftmax(JointSoftmax):
    """p(word | hidden) proportional to exp(weight[word] . hidden)."""

    def __init__(self, *, width: int, vocab_size: int, **options: Any) -> None:
        super().__init__(width=width, vocab_size=vocab_size, **options)
        self.weight = nn.Parameter(torch.empty(vocab_size, width))
        self.reset_parameters()

    @classmethod
    def build(cls, settings: Any, sizes: LayerSizes) -> "FullSoftmax":
        return cls(width=sizes.width, vocab_size=len(sizes.counts), fused=settings.fused)

    def views(self, hidden_ND: Tensor) -> list[Tensor]:
        return [hidden_ND]

    def weights(self) -> list[Tensor]:
        return [self.weight]

    def word_vectors(self) -> list[Tensor]:
        return [self.weight]
