"""Regularization of a training step: dropout of several kinds, and penalties on the hidden states.

- Dropout on embeddings, between layers and on the core's output; `locked` masks are constant over the steps of a batch
  (variational dropout: Gal and Ghahramani, 2016).
- Word dropout zeroes all occurrences of a word in a batch, and weight drop zeroes entries of recurrent matrices; AR and
  TAR penalize large and fast-changing hidden states (AWD-LSTM: Merity, Keskar and Socher, 2018).

Masks depend only on the seed and the step, never on history, the number of ranks or micro-batches.

Shapes: T steps, B streams, U distinct words in a batch, E embedding width, D width of the hidden state.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lm.config.groups import ModelConfig
from lm.data.batches import DistinctWords
from lm.system.randomness import generator_for


@dataclass(frozen=True)
class DropoutMasks:
    """Generates a training step's dropout masks; evaluation passes None instead."""

    seed: int
    step: int
    num_streams: int
    """Streams in the whole batch across all ranks; masks are drawn for all of them."""
    streams: slice
    """Streams computed by this process."""
    locked: bool = False
    """Whether `keep` draws one mask for all steps of the batch."""

    def of(self, streams: slice) -> "DropoutMasks":
        """Return the masks for a micro-batch, given as a slice of this process's streams."""
        first = self.streams.start
        return replace(self, streams=slice(first + streams.start, first + streams.stop))

    def keep(self, x_TBE: Tensor, probability: float, *, purpose: str) -> Tensor:
        """Draw a mask for this process's streams: 1 with this probability, else 0."""
        steps, _, width = x_TBE.shape
        mask_TBE = self.draw(x_TBE, (1 if self.locked else steps, self.num_streams, width), probability, purpose)
        if self.streams == slice(0, self.num_streams):
            return mask_TBE
        return mask_TBE[:, self.streams].contiguous()  # copy, to free the other streams' masks

    def draw(self, like: Tensor, shape: Sequence[int], probability: float, purpose: str) -> Tensor:
        """Draw a mask of this shape that is the same on all ranks.

        Each random number serves four entries, with 16 bits each: four times as fast as `bernoulli_` on a CPU.
        """
        generator, size = generator_for(self.seed, purpose, self.step, device=like.device), math.prod(shape)
        bits = torch.empty(-(-size // 4), dtype=torch.int64, device=like.device)
        bits.random_(-(2**63), None, generator=generator)
        keep = bits.view(torch.int16)[:size] < round(probability * 2**16) - 2**15
        return keep.view(*shape).to(like.dtype)


def drop(x_TBE: Tensor, masks: DropoutMasks | None, probability: float, *, layer: str) -> Tensor:
    """Zero entries with this probability and rescale the rest; different layers use independent masks."""
    if masks is None or probability == 0:
        return x_TBE
    keep = 1 - probability
    return x_TBE * masks.keep(x_TBE, keep, purpose=f"dropout {layer}").div_(keep)


def drop_words(x_TBE: Tensor, distinct: DistinctWords, masks: DropoutMasks, probability: float) -> Tensor:
    """Zero the embeddings of random words, everywhere in the batch, and rescale the rest."""
    if probability == 0:
        return x_TBE
    keep = 1 - probability
    mask_U = masks.draw(x_TBE, distinct.words_U.shape, keep, "word dropout").div_(keep)
    return x_TBE * mask_U[distinct.inverse][..., None]


def drop_weights(weight: Tensor, masks: DropoutMasks, probability: float, *, layer: str) -> Tensor:
    """Return a copy of the weight with random entries zeroed and the rest rescaled."""
    keep = 1 - probability
    return weight * masks.draw(weight, weight.shape, keep, f"weight drop of {layer}").div_(keep)


def penalties(hidden_TBD: Tensor, dropped_TBD: Tensor, settings: ModelConfig) -> list[Tensor]:
    """Return AR + TAR in a list that is empty without penalties.

    AR is the mean square of the hidden states after dropout, TAR that of their changes over time before dropout.
    """
    terms = []
    if settings.activation_penalty:
        terms.append(settings.activation_penalty * dropped_TBD.float().square().mean())
    if settings.change_penalty:
        change_TBD = hidden_TBD.float().diff(dim=0)
        terms.append(settings.change_penalty / max(1, change_TBD.numel()) * change_TBD.square().sum())
    return [torch.stack(terms).sum()] if terms else []
