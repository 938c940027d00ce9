"""The exact softmax over the whole vocabulary: one linear map without bias (section 3.3 of the paper).

Shapes: N tokens, D width, V words.
"""

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lm.config.groups import OutputConfig
from lm.config.registry import plugin
from lm.output.joint import JointSoftmax


@dataclass
class FullConfig(OutputConfig):
    """Exact softmax over the whole vocabulary."""


@plugin("output", "full", FullConfig)
class FullSoftmax(JointSoftmax):
    """p(word | hidden) proportional to exp(weight[word] . hidden)."""

    def __init__(
        self, *, width: int, vocab_size: int, fused: bool = True, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(width=width, vocab_size=vocab_size, fused=fused)
        self.weight = nn.Parameter(torch.empty(vocab_size, width))
        self.reset_parameters(generator)

    @classmethod
    def build(
        cls,
        settings: FullConfig,
        *,
        width: int,
        counts: NDArray[Any],
        classes: NDArray[Any] | None = None,  # noqa: ARG003
        generator: torch.Generator | None = None,
    ) -> "FullSoftmax":
        return cls(width=width, vocab_size=len(counts), fused=settings.fused, generator=generator)

    def views(self, hidden_ND: Tensor) -> list[Tensor]:
        return [hidden_ND]

    def weights(self) -> list[Tensor]:
        return [self.weight]
