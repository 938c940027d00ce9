"""Maximum-entropy n-gram features added to the network (Mikolov et al., 2011; "RNN + MaxEnt" in Table 2 of the paper).

Every n-gram up to a given order has a weight, added to the network's score for its last word or that word's class.
The weights are trained with the network. There are too many n-grams for a table, so all share one long vector. A
history is hashed, together with the softmax that scores the next word (the root, or the words of one class), to a
position in the vector. The weights of the softmax's entries start there, so a history's scores are one slice. Slices
of different histories may overlap and then share weights.

The vector is a `SparseTable` of short rows: a training step reads and updates only rows that its slices touch. The
host computes which rows these are.

Shapes: T steps, B streams, P = H + T steps including history words, N tokens, O n-gram orders, K entries in a softmax,
L weights, U rows of R weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lm.config.groups import MaxEntConfig
from lm.optim.sparse_table import SparseTable
from lm.output.logits import GPU_CHUNK_ELEMENTS, slices
from lm.system.errors import UserError

ROW = 16
"""Weights that are read and updated together: one cache line."""
PIECE = 1 << 18
"""Logits per piece on a CPU, which bounds the weight indices in memory to 2 MiB."""
GPU_PIECE = GPU_CHUNK_ELEMENTS // 8
"""Logits per piece on a GPU: 128 MiB of indices, because each piece costs kernel launches."""
NO_WORD = -1
"""Placeholder for history before the start of a stream."""
ODD = 0x1E3779B97F4A7C15
HALF = (1 << 32) - 1
POSITIVE = (1 << 63) - 1


@dataclass(frozen=True)
class NgramScores:
    """N-gram scores to add to one softmax's logits: a slice of the weights per token and order."""

    weight_L: Tensor
    start_NO: Tensor
    grad_L: Tensor | None = None
    """Gradient buffer for the weights; None if not needed."""

    def select(self, rows: slice) -> "NgramScores":
        return replace(self, start_NO=self.start_NO[rows])

    def add_to(self, logits_NK: Tensor) -> None:
        """Add the scores in place."""
        # View all slices as rows of an overlapping view: copying rows is ten times faster than gathering single
        # weights.
        length = logits_NK.size(1)
        slices = self.weight_L.as_strided((len(self.weight_L) - length + 1, length), (1, 1))
        for rows in _pieces(logits_NK):
            for start_n in self.start_NO[rows].unbind(1):
                logits_NK[rows].add_(slices.index_select(0, start_n))

    def add_gradient(self, grad_NK: Tensor) -> None:
        """Accumulate the logits' gradient into the weights' gradient."""
        if self.grad_L is None:
            return
        inside_K = torch.arange(grad_NK.size(1), device=grad_NK.device)
        for rows in _pieces(grad_NK):
            grad_nk = grad_NK[rows].flatten()
            for start_n in self.start_NO[rows].unbind(1):
                self.grad_L.scatter_add_(0, (start_n[:, None] + inside_K).flatten(), grad_nk)


def _pieces(logits_NK: Tensor) -> list[slice]:
    """Split rows so that their weight indices fit in memory next to the logits."""
    piece = PIECE if logits_NK.device.type == "cpu" else GPU_PIECE
    return slices(len(logits_NK), max(1, piece // max(1, logits_NK.size(1))))


class SoftmaxRows(NamedTuple):
    """Tokens of a batch, each with the softmax that scores it."""

    rows_N: Tensor
    """Flat positions of the tokens."""
    softmax_N: Tensor
    """Index of the softmax in `OutputLayer.softmax_sizes`."""
    length_N: Tensor
    """Number of entries in that softmax."""


class NgramPlan(NamedTuple):
    """Slice positions for a batch, one tensor per `SoftmaxRows`."""

    rows_U: Tensor
    """Table rows touched by the step on all ranks."""
    starts_NO: tuple[Tensor, ...]
    """Start of each slice within the weights of `rows_U`."""


class TouchedRows:
    """Table rows touched by a step, computed on the host, and slice positions within them.

    Overlapping slices are merged into runs of consecutive rows, which a step stores contiguously.
    """

    def __init__(self, starts_NO: Sequence[Tensor], lengths_N: Sequence[Tensor]) -> None:
        first, order = torch.cat([(start_NO // ROW).flatten() for start_NO in starts_NO]).sort()
        pairs = zip(starts_NO, lengths_N, strict=True)
        last = torch.cat([((start_NO + length_N[:, None] - 1) // ROW).flatten() for start_NO, length_N in pairs])
        last = last[order].cummax(0).values
        is_new = torch.ones_like(first, dtype=torch.bool)
        is_new[1:] = first[1:] > last[:-1]
        self.first_row = first[is_new]
        lengths = last[torch.cat([is_new[1:], is_new[:1]])] + 1 - self.first_row
        self.shift = lengths.cumsum(0) - lengths - self.first_row
        """Offset from each run's row ids to positions in `rows_U`."""
        self.rows_U = torch.repeat_interleave(-self.shift, lengths)
        self.rows_U += torch.arange(len(self.rows_U), device="cpu")

    def local(self, start_NO: Tensor) -> Tensor:
        """Convert slice starts to positions within the weights of `rows_U`."""
        run_NO = torch.searchsorted(self.first_row, start_NO // ROW, right=True) - 1
        return start_NO + ROW * self.shift[run_NO]


class MaxEnt(nn.Module):
    """All n-gram weights, with the hashing that locates each slice."""

    def __init__(self, settings: MaxEntConfig, *, vocab_size: int, unk_id: int, largest_softmax: int) -> None:
        super().__init__()
        size = settings.size
        if size < largest_softmax:
            raise UserError(
                f"model.maxent.size must be at least the size of the output layer's largest softmax "
                f"({largest_softmax}); got {size}. Try model.maxent.size={max(1 << 22, 16 * largest_softmax)}."
            )
        self.size, self.vocab_size, self.unk_id = size, vocab_size, unk_id
        self.look_back = (settings.order or 1) - 1
        """Number of words before a batch that its n-grams depend on."""
        self.table = SparseTable(math.ceil(size / ROW), ROW)
        nn.init.zeros_(self.table.weight)

    def contexts(self, words_PB: Tensor) -> Tensor:
        """Hash the last 0, 1, 2, ... words at each step, (T, B, O).

        `words_PB` holds the words of `look_back` + T steps.
        """
        steps = len(words_PB) - self.look_back
        # OOV words that only a character-level input can distinguish were `<unk>` in training.
        words_PB = words_PB.masked_fill(words_PB >= self.vocab_size, self.unk_id)
        hashes = [torch.zeros_like(words_PB[self.look_back :])]
        for back in range(self.look_back):
            word_TB = words_PB[self.look_back - back : self.look_back - back + steps]
            hashes.append(_mixed(hashes[-1], word_TB - NO_WORD))
        return torch.stack(hashes, dim=-1)

    def starts(self, rows: SoftmaxRows, contexts: Tensor) -> Tensor:
        """Slice starts within the full weight vector, (N, O)."""
        context_NO = contexts.flatten(0, -2)[rows.rows_N]
        hash_NO = _mixed(context_NO, rows.softmax_N[:, None]) & POSITIVE
        return hash_NO % (self.size + 1 - rows.length_N[:, None])

    def plan(self, parts: Sequence[SoftmaxRows], contexts: Tensor, touched: TouchedRows) -> NgramPlan:
        """Build a micro-batch's plan on the host."""
        return NgramPlan(touched.rows_U, tuple(touched.local(self.starts(part, contexts)) for part in parts))

    def scores(self, plan: NgramPlan) -> list[NgramScores]:
        """Return the n-gram scores for a training step, one per `SoftmaxRows`."""
        weight_UR = self.table(plan.rows_U, plan.rows_U)
        return [NgramScores(weight_UR.flatten(), start_NO) for start_NO in plan.starts_NO]


class NgramContexts(NamedTuple):
    """N-gram histories of the tokens scored in evaluation."""

    maxent: MaxEnt
    hashes: Tensor
    """Result of `MaxEnt.contexts`, (..., O)."""

    def scores(self, rows: SoftmaxRows) -> NgramScores:
        return NgramScores(self.maxent.table.weight.flatten(), self.maxent.starts(rows, self.hashes))

    def of_softmax(self, softmax: int, length: int) -> NgramScores:
        """Scores of all tokens for one softmax with `length` entries."""
        row_N = torch.arange(self.hashes.shape[:-1].numel(), device=self.hashes.device)
        return self.scores(SoftmaxRows(row_N, torch.full_like(row_N, softmax), torch.full_like(row_N, length)))


def _mixed(hash: Tensor, value: Tensor) -> Tensor:
    """Combine a hash with a value; int64 products wrap around."""
    for _ in range(2):
        hash = (hash ^ ((hash >> 32) & HALF)) * ODD + value
    return hash ^ ((hash >> 32) & HALF)
