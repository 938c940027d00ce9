"""Training batches: B contiguous streams, T steps at a time, prepared on the host by a background thread.

Everything that depends on a batch's content is computed here, before it is copied to the device: the distinct input
words, and the plans of input and output layer.

Shapes: T steps, B streams, U distinct input words.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.system.errors import UserError
from lm.system.randomness import generator_for
from lm.system.tree import map_leaves


class DistinctWords(NamedTuple):
    """The distinct input words of a batch, in increasing order."""

    words_U: Tensor
    inverse: Tensor
    """For each input, its position in `words_U`."""
    plan: Any
    """Result of the input's `plan`."""


class Planner(Protocol):
    """The part of a model that plans batches on the host."""

    @property
    def look_back(self) -> int:
        """Words read before a batch that `plan_output` needs."""

    def plan_input(self, distinct_U: Tensor) -> Any:
        """Return the input's plan of the distinct words."""

    def plan_output(
        self, targets_TB: Tensor, groups: Sequence[slice], *, words_PB: Tensor, generator: torch.Generator
    ) -> tuple[Any, ...]:
        """Return the output layer's plan of each micro-batch."""


def to_device(tree: Any, device: torch.device) -> Any:
    """Copy a tree of tensors to a device asynchronously, each distinct tensor once."""
    return _moved(tree, lambda tensor: tensor.to(device, non_blocking=True))


def _moved(tree: Any, move: Callable[[Tensor], Tensor]) -> Any:
    done: dict[int, Tensor] = {}

    def once(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in done:
            done[id(leaf)] = move(leaf)
        return done[id(leaf)]

    return map_leaves(once, tree)


@dataclass(frozen=True)
class Batch:
    """The inputs and targets of one step, with their host-side bookkeeping."""

    inputs_TB: Tensor
    targets_TB: Tensor
    distinct: DistinctWords
    """Distinct words among the inputs of all ranks."""
    groups: tuple[slice, ...]
    """Streams of each micro-batch; a single group unless gradients are accumulated."""
    plans: tuple[Any, ...]
    """The output layer's plan of each group."""

    @property
    def num_tokens(self) -> int:
        return self.targets_TB.numel()

    @property
    def device(self) -> torch.device:
        return self.targets_TB.device

    def to(self, device: torch.device) -> Batch:
        """Copy to the device asynchronously."""
        batch: Batch = to_device(self, device)
        return batch

    def pin_memory(self) -> Batch:
        batch: Batch = _moved(self, Tensor.pin_memory)
        return batch


class ShuffledShards:
    """A random order of the shards for each epoch, determined by seed and epoch."""

    def __init__(self, ends: Sequence[int], *, seed: int) -> None:
        """`ends` are the positions at which the shards end, in increasing order."""
        self.starts = np.array([0, *ends[:-1]], np.int64)
        self.lengths = np.array(ends, np.int64) - self.starts
        self.seed = seed

    def positions(self, positions: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """Map positions in the shuffled epoch to positions in the corpus."""
        order = torch.randperm(len(self.starts), generator=generator_for(self.seed, "shards", epoch)).numpy()
        begins = np.cumsum(self.lengths[order]) - self.lengths[order]
        shard = np.searchsorted(begins, positions, side="right") - 1
        moved: NDArray[np.int64] = self.starts[order] - begins
        return positions + moved[shard]


class Streams:
    """The training text as B parallel streams; the position is one integer, the step.

    Each stream is a contiguous B-th of the text (the remainder, fewer than B tokens, is dropped). Every token of a
    stream is a target once per epoch; its input is the token before it, `</s>` for the very first. The last step of an
    epoch may be shorter. With `shards`, the order of the shards differs between epochs. With `length_seed`, the lengths
    of the steps are random (`random_bounds`); every epoch has the same number of steps.
    """

    def __init__(
        self,
        tokens: NDArray[np.unsignedinteger],
        *,
        batch_size: int,
        bptt: int,
        eos_id: int,
        shards: ShuffledShards | None = None,
        length_seed: int | None = None,
    ) -> None:
        self.tokens, self.bptt, self.eos_id, self.shards, self.length_seed = tokens, bptt, eos_id, shards, length_seed
        self.length = len(tokens) // batch_size
        if self.length == 0:
            raise UserError(
                f"trainer.batch_size must not exceed the training tokens ({len(tokens)}); got {batch_size}. "
                f"Try trainer.batch_size={max(1, len(tokens) // 100)}."
            )
        self.starts_B = np.arange(batch_size) * self.length
        self.steps_per_epoch = -(-self.length // bptt)

    def bounds(self, index: int, *, epoch: int) -> tuple[int, int]:
        """Return where a step of an epoch begins and ends in every stream."""
        if self.length_seed is None:
            return index * self.bptt, min((index + 1) * self.bptt, self.length)
        bounds = random_bounds(self.length, self.steps_per_epoch, self.bptt, seed=self.length_seed, epoch=epoch)
        return int(bounds[index]), int(bounds[index + 1])

    def tokens_before(self, step: int) -> int:
        """Number of targets in the first `step` steps."""
        epoch, index = divmod(step, self.steps_per_epoch)
        return len(self.starts_B) * (epoch * self.length + self.bounds(index, epoch=epoch)[0])

    def read(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs and targets, each (T, B), of a step counted from the start of training."""
        epoch, index = divmod(step, self.steps_per_epoch)
        first, end = self.bounds(index, epoch=epoch)
        offsets = np.arange(first - 1, end)
        positions_TB = (offsets[:, None] + self.starts_B[None, :]).clip(min=0)  # nothing precedes the first token
        if self.shards is not None:
            positions_TB = self.shards.positions(positions_TB, epoch=epoch)
        words_TB = self.tokens[positions_TB].astype(np.int64)
        if first == 0:
            words_TB[0, 0] = self.eos_id
        return words_TB[:-1], words_TB[1:]

    def read_before(self, step: int, count: int) -> NDArray[np.int64]:
        """Return the last `count` inputs before a step, (count, B); -1 before the start of training."""
        before = np.full((count, len(self.starts_B)), -1)
        while step > 0 and (missing := int((before[:, 0] < 0).sum())):
            step -= 1
            inputs_TB = self.read(step)[0][-missing:]
            before[missing - len(inputs_TB) : missing] = inputs_TB
        return before


@lru_cache(maxsize=4)
def random_bounds(length: int, num_steps: int, bptt: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Cut a stream of this length into steps of random lengths; return the positions of the cuts, 0 and the end.

    Lengths are normal around `bptt`, in 5% of the steps around half of it, with a standard deviation of 5 (AWD-LSTM),
    then scaled so that `num_steps` of them fill the stream.
    """
    generator = generator_for(seed, "bptt", epoch)
    means = torch.where(torch.rand(num_steps, generator=generator) < 0.05, bptt / 2, float(bptt))
    lengths = torch.normal(means, 5.0, generator=generator).clamp(min=5).double().numpy()
    bounds: NDArray[np.int64] = np.rint(np.cumsum([0, *lengths]) * (length / lengths.sum())).astype(np.int64)
    return bounds


def groups_of(num_streams: int, num_groups: int) -> tuple[slice, ...]:
    """Split the streams into groups of about equal size."""
    return tuple(slice(num_streams * i // num_groups, num_streams * (i + 1) // num_groups) for i in range(num_groups))


class BatchLoader:
    """Iterates over batches from a given step on, prefetched by a thread inside the `with` block."""

    AHEAD = 16
    """Batches to prefetch."""

    def __init__(
        self,
        streams: Streams,
        planner: Planner,
        *,
        seed: int,
        start: int,
        pin: bool,
        micro_batches: int = 1,
        columns: slice | None = None,
    ) -> None:
        """`columns` are the streams of this rank, all by default."""
        self.streams, self.planner, self.seed, self.pin = streams, planner, seed, pin
        self.columns = columns or slice(0, len(streams.starts_B))
        self.groups = groups_of(self.columns.stop - self.columns.start, micro_batches)
        self.start = start
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")

    def __iter__(self) -> Iterator[Batch]:
        steps = count(self.start)
        ready = deque(self._thread.submit(self.make, step) for step in islice(steps, self.AHEAD))
        while True:
            yield ready.popleft().result()
            ready.append(self._thread.submit(self.make, next(steps)))

    def make(self, step: int) -> Batch:
        """Make the batch of any step, without the prefetch thread."""
        inputs_TB, targets_TB = (torch.from_numpy(np.ascontiguousarray(words)) for words in self.streams.read(step))
        # Rows and samples are those of the whole batch, so they are the same on all ranks.
        rows_U, inverse_TB = torch.unique(inputs_TB, return_inverse=True)
        first = self.columns.start
        groups = [slice(first + group.start, first + group.stop) for group in self.groups]
        before_HB = torch.from_numpy(self.streams.read_before(step, self.planner.look_back))
        words_PB = torch.cat([before_HB, inputs_TB])
        generator = generator_for(self.seed, "plan", step)
        plans = self.planner.plan_output(targets_TB, groups, words_PB=words_PB, generator=generator)
        parts = (words_TB[:, self.columns].contiguous() for words_TB in (inputs_TB, targets_TB, inverse_TB))
        inputs_Tb, targets_Tb, inverse_Tb = parts
        distinct = DistinctWords(rows_U, inverse_Tb, self.planner.plan_input(rows_U))
        batch = Batch(inputs_Tb, targets_Tb, distinct, self.groups, plans)
        return batch.pin_memory() if self.pin else batch

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(cancel_futures=True)
