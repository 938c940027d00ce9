"""The contract that every output layer keeps.

An output layer turns hidden states into a distribution over the vocabulary, p(word | hidden), and into a training
loss. The trainer, the evaluation and generation know nothing but this page.

Shapes: N tokens (any leading shape is accepted and flattened), D width of the hidden state, V words.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lm.errors import UserError

IGNORE_INDEX = -100
"""Targets with this value are not scored: padding, and the unscored warm-up of an evaluation piece."""


@dataclass(frozen=True)
class Plan:
    """What the host knows of a batch's targets before the device sees them.

    Tensors travel with the batch; counts stay on the host, where they size slices without asking the device.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    counts: tuple[int, ...] = ()

    def to(self, device: torch.device) -> "Plan":
        return Plan({name: t.to(device, non_blocking=True) for name, t in self.tensors.items()}, self.counts)

    def pin_memory(self) -> "Plan":
        return Plan({name: t.pin_memory() for name, t in self.tensors.items()}, self.counts)


class OutputLayer(nn.Module, ABC):
    """p(word | hidden) over a vocabulary whose ids are sorted by decreasing count."""

    def __init__(self, *, width: int, vocab_size: int) -> None:
        super().__init__()
        self.width = width
        self.vocab_size = vocab_size

    def plan(self, targets: Tensor, *, generator: torch.Generator | None = None) -> Plan:  # noqa: ARG002
        """Whatever bucketing the layer needs, made on the host from host targets; refuses ids out of range.

        `generator` is seeded by (seed, step); layers that draw samples draw them from it and from nowhere else.
        """
        self.check_range(targets)
        return Plan()

    @abstractmethod
    def loss(self, hidden: Tensor, targets: Tensor, plan: Plan | None = None) -> Tensor:
        """The training objective, mean over scored tokens (0 if there are none).

        Every parameter gets a gradient, zeros where a cluster was empty. Without a plan one is made, which may ask
        the device for the targets.
        """

    @abstractmethod
    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Exact -log p(target | hidden) per token under the normalised model, 0 where ignored; shaped as targets."""

    @abstractmethod
    def log_prob(self, hidden: Tensor) -> Tensor:
        """The exact log-distribution over the whole vocabulary, (..., V)."""

    @abstractmethod
    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k likeliest words: (log-probabilities, ids), both (..., k), likeliest first, exact."""

    @abstractmethod
    def sample(
        self,
        hidden: Tensor,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """One word id per hidden state, drawn from the (tempered, truncated) distribution."""

    def describe(self) -> dict[str, Any]:
        """Parameters and structure as plain values, for the log and for comparisons."""
        return {
            "layer": type(self).__name__,
            "vocabulary": self.vocab_size,
            "parameters": sum(p.numel() for p in self.parameters()),
        }

    def check_range(self, targets: Tensor) -> None:
        """Refuse targets outside the vocabulary; called on the host only."""
        assert targets.device.type == "cpu", "targets are checked on the host"
        wrong = targets[(targets != IGNORE_INDEX) & ((targets < 0) | (targets >= self.vocab_size))]
        if wrong.numel():
            raise UserError(
                f"target word id {int(wrong[0])} is outside the vocabulary (0 to {self.vocab_size - 1}); "
                f"use {IGNORE_INDEX} for positions that are not to be scored."
            )


def draw(
    log_prob_NV: Tensor,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Draw one column per row after tempering, keeping the `top_k` best and the smallest set that holds `top_p`."""
    if temperature == 0:
        return log_prob_NV.argmax(-1)
    scores_NV, ids_NV = (log_prob_NV / temperature).sort(-1, descending=True)
    probs_NV = scores_NV.softmax(-1)
    if top_k is not None:
        probs_NV[:, top_k:] = 0
    if top_p is not None:
        total_N1 = probs_NV.sum(-1, keepdim=True)
        before_NV = probs_NV.cumsum(-1) - probs_NV
        probs_NV = probs_NV.masked_fill(before_NV >= top_p * total_N1, 0)
    choice_N1 = torch.multinomial(probs_NV, 1, generator=generator)
    return ids_NV.gather(-1, choice_N1).squeeze(-1)
