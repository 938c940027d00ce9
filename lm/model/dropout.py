"""Dropout whose masks depend on the seed and the step alone, never on history or on the number of ranks.

Shapes: T steps, B streams, E width.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from lm.system.randomness import generator_for


@dataclass(frozen=True)
class DropoutMasks:
    """Where dropout takes its masks from in a training step; evaluation passes None instead."""

    seed: int
    step: int
    num_streams: int
    """Of the whole batch, over all ranks: masks are drawn for all of them."""
    streams: slice
    """Those that are computed."""

    @classmethod
    def of_batch(cls, seed: int, step: int, num_streams: int) -> "DropoutMasks":
        """For a batch that one process computes whole."""
        return cls(seed, step, num_streams, slice(0, num_streams))

    def of(self, streams: slice) -> "DropoutMasks":
        """What some of the computed streams get of the masks."""
        first = self.streams.start
        return replace(self, streams=slice(first + streams.start, first + streams.stop))

    def keep(self, x_TBE: Tensor, probability: float, *, purpose: str) -> Tensor:
        """A mask for the computed streams: 1 with this probability, else 0."""
        steps, _, width = x_TBE.shape
        generator = generator_for(self.seed, purpose, self.step, device=x_TBE.device)
        mask_TBE = x_TBE.new_empty(steps, self.num_streams, width).bernoulli_(probability, generator=generator)
        if self.streams == slice(0, self.num_streams):
            return mask_TBE
        return mask_TBE[:, self.streams].contiguous()  # a copy, so that the other streams' can be let go


def drop(x_TBE: Tensor, masks: DropoutMasks | None, probability: float, *, place: str) -> Tensor:
    """Zero numbers with this probability and scale up the others; masks of different places are independent."""
    if masks is None or probability == 0:
        return x_TBE
    keep = 1 - probability
    return x_TBE * masks.keep(x_TBE, keep, purpose=f"dropout {place}").div_(keep)
