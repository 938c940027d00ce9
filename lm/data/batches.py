"""Training batches: B contiguous streams, T steps at a time, prepared on the host by a background thread.

Everything that depends on a batch's content is computed here, before it is copied to the device: the distinct input
words, and the plans of input and output layer.

Shapes: T steps, B streams, U distinct input words.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, islice
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding_bag

from lm.system.errors import UserError
from lm.system.randomness import generator_for, seed_for
from lm.system.tree import map_leaves

IGNORE_INDEX = -100
"""Target value that is not scored: padding, and the warm-up tokens of an evaluation chunk."""
Tree = TypeVar("Tree")


class Uses(NamedTuple):
    """Uses of a table's rows: their numbers sorted by row, and where each row's uses start in that order."""

    order_N: Tensor
    starts_U: Tensor

    @classmethod
    def of(cls, inverse: Tensor, *, num_rows: int) -> Uses:
        """`inverse` has the row of each use."""
        sorted_N, order_N = inverse.flatten().sort(stable=True)
        return cls(order_N, torch.searchsorted(sorted_N, torch.arange(num_rows)))

    def sum(self, values_NE: Tensor) -> Tensor:
        """Sum the values of each row's uses, (U, E), in a fixed order on any device."""
        sums_UE: Tensor = embedding_bag(self.order_N, values_NE, self.starts_U, mode="sum")
        return sums_UE


class DistinctWords(NamedTuple):
    """The distinct input words of a batch, in increasing order."""

    words_U: Tensor
    inverse: Tensor
    """For each input, its position in `words_U`."""
    plan: Any
    """Result of the input's `plan`."""
    uses: Uses | None = None


def to_device(tree: Tree, device: torch.device) -> Tree:
    """Copy a tree of tensors to a device asynchronously."""
    return moved(tree, lambda tensor: tensor.to(device, non_blocking=True))


def moved(tree: Tree, move: Callable[[Tensor], Tensor]) -> Tree:
    """Move a tree of tensors, each distinct tensor once."""
    move_once = lru_cache(None)(move)  # tensors are hashed by identity
    return cast(Tree, map_leaves(lambda leaf: move_once(leaf) if isinstance(leaf, Tensor) else leaf, tree))


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
    num_tokens: int
    """Scored targets of all ranks."""
    resets: bool
    """Whether the streams start from a zero state."""

    @property
    def device(self) -> torch.device:
        return self.targets_TB.device


class Streams:
    """The training text as B parallel streams; the position is one integer, the step.

    Each stream is a contiguous B-th of the text (the remainder, fewer than B tokens, is dropped). Every token of a
    stream is a target once per epoch; its input is the token before it, `</s>` for the very first. The last step of an
    epoch may be shorter. With `length_seed`, the lengths of the steps are random (`random_bounds`); every epoch has the
    same number of steps.
    """

    def __init__(
        self,
        tokens: NDArray[np.unsignedinteger],
        *,
        batch_size: int,
        bptt: int,
        eos_id: int,
        length_seed: int | None = None,
    ) -> None:
        self.tokens, self.bptt, self.eos_id, self.length_seed = tokens, bptt, eos_id, length_seed
        self.length = len(tokens) // batch_size
        if self.length == 0:
            raise UserError(
                f"trainer.batch_size must not exceed the training tokens ({len(tokens)}); got {batch_size}. "
                f"Try trainer.batch_size={max(1, len(tokens) // 100)}."
            )
        self.starts_B = np.arange(batch_size) * self.length
        self.steps_per_epoch = -(-self.length // bptt)
        self.num_streams, self.tokens_per_epoch = batch_size, batch_size * self.length

    def resets(self, step: int) -> bool:
        """Always False: hidden states carry over between epochs."""
        return False

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


class Lines:
    """The training text as shuffled lines, each from a zero state; the position is one integer, the step.

    Lines of similar length form batches of B, padded to the longest; a batch is read in steps of at most `bptt` tokens.
    Every epoch has other batches in another order, determined by seed and epoch, but as many steps as any other.
    """

    def __init__(
        self, tokens: NDArray[np.unsignedinteger], *, batch_size: int, bptt: int, eos_id: int, seed: int
    ) -> None:
        self.tokens, self.bptt, self.eos_id, self.seed, self.num_streams = tokens, bptt, eos_id, seed, batch_size
        self.starts, self.lengths = line_bounds(tokens, eos_id=eos_id)
        self.tokens_per_epoch = len(tokens)
        self.lengths_NB = np.zeros((-(-len(self.lengths) // batch_size), batch_size), np.int64)
        """Lengths of the lines of each batch, from the shortest lines to the longest."""
        self.lengths_NB.flat[: len(self.lengths)] = np.sort(self.lengths)
        self.steps_of_batch = -(-self.lengths_NB.max(1) // bptt)
        self.steps_per_epoch = int(self.steps_of_batch.sum())
        self.epoch = lru_cache(maxsize=3)(self._epoch)

    def _epoch(self, epoch: int) -> tuple[NDArray[np.int64], ...]:
        """Sort the lines by length, in random order among equals, and draw an order of the batches of B.

        Returns the lines, the batches, and in their order the first step of each and the targets before it.
        """
        generator = np.random.default_rng(seed_for(self.seed, "lines", epoch))
        shuffled = generator.permutation(len(self.lengths))
        lines = shuffled[np.argsort(self.lengths[shuffled], kind="stable")]
        batches = generator.permutation(len(self.steps_of_batch))
        steps, tokens = self.steps_of_batch[batches], self.lengths_NB.sum(1)[batches]
        return lines, batches, np.cumsum(steps) - steps, np.cumsum(tokens) - tokens

    def _find(self, step: int) -> tuple[NDArray[np.int64], int, int]:
        """Return the lines of a step's batch, where in them the step begins, and the number of targets before it."""
        epoch, index = divmod(step, self.steps_per_epoch)
        lines, batches, firsts, tokens = self.epoch(epoch)
        number = int(np.searchsorted(firsts, index, side="right")) - 1
        batch, position = int(batches[number]), (index - int(firsts[number])) * self.bptt
        before = epoch * self.tokens_per_epoch + tokens[number] + self.lengths_NB[batch].clip(max=position).sum()
        return lines[batch * self.num_streams :][: self.num_streams], position, int(before)

    def resets(self, step: int) -> bool:
        """Whether a new batch of lines begins."""
        return self._find(step)[1] == 0

    def tokens_before(self, step: int) -> int:
        """Number of targets in the first `step` steps."""
        return self._find(step)[2]

    def read(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs and targets, each (T, B), of a step; targets of padding are ignored."""
        lines, first, _ = self._find(step)
        steps = min(self.bptt, int(self.lengths[lines].max()) - first)
        inputs_TB = self._words(lines, first - 1, steps, fill=self.eos_id)
        return inputs_TB, self._words(lines, first, steps, fill=IGNORE_INDEX)

    def _words(self, lines: NDArray[np.int64], first: int, steps: int, *, fill: int) -> NDArray[np.int64]:
        """Return words of lines from a position on, (T, B), with `fill` outside of them."""
        offsets_TB = first + np.arange(steps)[:, None] + np.zeros(self.num_streams, np.int64)
        lengths_B, starts_B = np.zeros((2, self.num_streams), np.int64)
        lengths_B[: len(lines)], starts_B[: len(lines)] = self.lengths[lines], self.starts[lines]
        inside_TB = (offsets_TB >= 0) & (offsets_TB < lengths_B)
        words_TB = np.full(offsets_TB.shape, fill, np.int64)
        words_TB[inside_TB] = self.tokens[(starts_B + offsets_TB)[inside_TB]]
        return words_TB

    def read_before(self, step: int, count: int) -> NDArray[np.int64]:
        """Return the last `count` inputs before a step, (count, B); -1 before the start of a line."""
        lines, first, _ = self._find(step)
        words_HB = self._words(lines, first - 1 - count, count, fill=-1)
        if 0 < first <= count:
            words_HB[count - first] = self.eos_id  # the input of a line's first word
        return words_HB


TrainingText = Streams | Lines


def line_bounds(tokens: NDArray[Any], *, eos_id: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the start and length of each line, `</s>` included."""
    ends = np.flatnonzero(tokens == eos_id) + 1
    if not len(ends) or ends[-1] != len(tokens):
        ends = np.append(ends, len(tokens))
    starts = np.concatenate([[0], ends[:-1]])
    return starts, ends - starts


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


class BatchLoader:
    """Iterates over batches from a given step on, prefetched by a thread inside the `with` block."""

    AHEAD = 16
    """Batches to prefetch."""

    def __init__(
        self,
        streams: TrainingText,
        planner: Any,
        *,
        seed: int,
        start: int,
        pin: bool,
        micro_batches: int = 1,
        columns: slice | None = None,
    ) -> None:
        """`planner` is the model, which plans on the host; `columns` are the streams of this rank, all by default."""
        self.streams, self.planner, self.seed, self.pin = streams, planner, seed, pin
        self.columns = columns or slice(0, streams.num_streams)
        bounds = [(self.columns.stop - self.columns.start) * i // micro_batches for i in range(micro_batches + 1)]
        self.groups = tuple(map(slice, bounds, bounds[1:]))
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
        uses = Uses.of(inverse_Tb, num_rows=len(rows_U))
        distinct = DistinctWords(rows_U, inverse_Tb, self.planner.input.plan(rows_U), uses)
        num_tokens = int((targets_TB != IGNORE_INDEX).sum())
        batch = Batch(inputs_Tb, targets_Tb, distinct, self.groups, plans, num_tokens, self.streams.resets(step))
        return moved(batch, Tensor.pin_memory) if self.pin else batch

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(cancel_futures=True)
