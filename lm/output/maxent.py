"""Maximum-entropy features beside the network (Mikolov et al., 2011; "RNN + MaxEnt" in Table 2 of the paper).

Every n-gram up to an order has a weight, which is added to the score that the network gives to its last word, or to the
class of that word. The weights are trained with the network. There are too many n-grams for a table, so all share one
long vector. The words before the last, together with the softmax that scores it (the root, or the words of one class),
are hashed to a place in the vector; the weights of the softmax's entries follow each other from there. So the scores of
a context are a slice. Where slices of different contexts overlap, they share weights.

The vector is a `SparseTable` of short rows: a training step reads and changes only the rows that its slices touch.
Which rows those are is found on the host.

Shapes: T steps, B streams, H words before them, N tokens, O n-gram orders, K entries of a softmax, L weights, U rows.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lm.optim.sparse_table import SparseTable
from lm.output.logits import GPU_CHUNK_ELEMENTS
from lm.system.errors import UserError

ROW = 16
"""Weights that are read and updated together: a cache line of them."""
PIECE = 1 << 18
"""Logits whose places among the weights are held at once: 2 MiB of them."""
GPU_PIECE = GPU_CHUNK_ELEMENTS // 8
"""On a GPU, where every piece costs launches: 128 MiB of places."""
NO_WORD = -1
"""What a stream read before its first word."""
ODD = 0x1E3779B97F4A7C15
HALF = (1 << 32) - 1
POSITIVE = (1 << 63) - 1


@dataclass(frozen=True)
class NgramScores:
    """What n-grams add to the logits of one softmax: for each token and order, a slice of the weights."""

    weight_L: Tensor
    start_NO: Tensor
    grad_L: Tensor | None = None
    """Where the gradient of the weights goes; None: not wanted."""

    def select(self, rows: slice) -> "NgramScores":
        return replace(self, start_NO=self.start_NO[rows])

    def add_to(self, logits_NK: Tensor) -> None:
        """Add the scores in place; for autograd where it is on."""
        inside_K = torch.arange(logits_NK.size(1), device=logits_NK.device)
        if torch.is_grad_enabled():
            for start_N in self.start_NO.unbind(1):
                logits_NK.add_(self.weight_L[start_N[:, None] + inside_K])
            return
        # All slices as rows of an overlapping view: copying some takes a tenth of the time of looking up each number.
        num_slices = len(self.weight_L) - len(inside_K) + 1
        slices = self.weight_L.as_strided((num_slices, len(inside_K)), (1, 1))
        for rows in _pieces(logits_NK):
            for start_n in self.start_NO[rows].unbind(1):
                logits_NK[rows].add_(slices.index_select(0, start_n))

    def add_gradient(self, grad_NK: Tensor) -> None:
        """Add the gradient of the logits to that of the weights."""
        if self.grad_L is None:
            return
        inside_K = torch.arange(grad_NK.size(1), device=grad_NK.device)
        for rows in _pieces(grad_NK):
            grad_nk = grad_NK[rows].flatten()
            for start_n in self.start_NO[rows].unbind(1):
                self.grad_L.scatter_add_(0, (start_n[:, None] + inside_K).flatten(), grad_nk)


def _pieces(logits_NK: Tensor) -> list[slice]:
    """Rows whose logits are few enough to be worked on beside all others."""
    size = max(1, piece_logits(logits_NK.device.type) // max(1, logits_NK.size(1)))
    return [slice(first, first + size) for first in range(0, len(logits_NK), size)]


def piece_logits(kind: str) -> int:
    """Logits of a piece on a kind of device."""
    return PIECE if kind == "cpu" else GPU_PIECE


class Slices(NamedTuple):
    """Where the scores of tokens are in the vector."""

    start_NO: Tensor
    length_N: Tensor
    """Entries of the softmax that scores each token."""


class TouchedRows:
    """The rows of a step, and where its slices are among them, on the host.

    Slices that share rows are merged into runs of consecutive rows, which a step holds contiguously.
    """

    def __init__(self, slices: Iterable[Slices]) -> None:
        parts = [(start_NO // ROW, (start_NO + length_N[:, None] - 1) // ROW) for start_NO, length_N in slices]
        first, order = torch.cat([first_NO.flatten() for first_NO, _ in parts]).sort()
        last = torch.cat([last_NO.flatten() for _, last_NO in parts])[order].cummax(0).values
        is_new = torch.ones_like(first, dtype=torch.bool)
        is_new[1:] = first[1:] > last[:-1]
        self.first_row = first[is_new]
        lengths = last[torch.cat([is_new[1:], is_new[:1]])] + 1 - self.first_row
        self.moved = lengths.cumsum(0) - lengths - self.first_row
        """What is added to the row numbers of each run."""
        self.rows_U = torch.repeat_interleave(-self.moved, lengths)
        self.rows_U += torch.arange(len(self.rows_U), device="cpu")

    def place(self, start_NO: Tensor) -> Tensor:
        """The starts of slices in the weights of these rows alone."""
        run_NO = torch.searchsorted(self.first_row, start_NO // ROW, right=True) - 1
        return start_NO + ROW * self.moved[run_NO]


class MaxEnt(nn.Module):
    """The weights of all n-grams, and where to find them."""

    def __init__(self, *, order: int, size: int, vocab_size: int, unk_id: int, largest_softmax: int) -> None:
        super().__init__()
        if size < largest_softmax:
            raise UserError(
                "model.maxent.size must hold the scores of the largest softmax of the output layer, "
                f"{largest_softmax}; got {size}. Try model.maxent.size={max(1 << 22, 16 * largest_softmax)}"
            )
        self.order, self.size, self.vocab_size, self.unk_id = order, size, vocab_size, unk_id
        self.table = SparseTable(math.ceil(size / ROW), ROW)
        nn.init.zeros_(self.table.weight)

    def no_history(self, num_streams: int, *, device: torch.device) -> Tensor:
        """The words before a text, (H, B)."""
        return torch.full((self.order - 1, num_streams), NO_WORD, device=device)

    def contexts(self, words_PB: Tensor) -> Tensor:
        """The hashes of the words up to each step, (T, B, O): of none of them, of the last, of the last two...

        `words_PB` are the words of H + T steps, where H is one less than the order.
        """
        before = self.order - 1
        steps = len(words_PB) - before
        # Words that only the input knows by their letters were `<unk>` in training.
        words_PB = words_PB.masked_fill(words_PB >= self.vocab_size, self.unk_id)
        hashes = [torch.zeros_like(words_PB[before:])]
        for back in range(before):
            word_TB = words_PB[before - back : before - back + steps]
            hashes.append(_mixed(hashes[-1], word_TB - NO_WORD))
        return torch.stack(hashes, dim=-1)

    def slices(self, context_NO: Tensor, *, softmax_N: Tensor, length_N: Tensor) -> Slices:
        """Where the scores of these softmaxes after these contexts are."""
        hash_NO = _mixed(context_NO, softmax_N[:, None]) & POSITIVE
        return Slices(hash_NO % (self.size + 1 - length_N[:, None]), length_N)

    def scores(self, context_NO: Tensor, *, softmax: int, length: int) -> NgramScores:
        """Those of one softmax, out of the whole vector."""
        softmax_N, length_N = (context_NO.new_full((len(context_NO),), number) for number in (softmax, length))
        return NgramScores(self.weights(), self.slices(context_NO, softmax_N=softmax_N, length_N=length_N).start_NO)

    def weights(self, rows_U: Tensor | None = None) -> Tensor:
        """All weights, or those of a training step's rows, side by side."""
        return (self.table.weight if rows_U is None else self.table(rows_U, rows_U)).flatten()

    def touched(self, num_tokens: int, *, per_context: float) -> int:
        """About how many weights a step reads that looks up so many for each context of a token."""
        # The context of no words is the same for all tokens, so its weights are as many as there are words at most.
        looked_up = num_tokens * (self.order - 1) * (per_context + ROW) + self.vocab_size
        return round(-self.size * math.expm1(-looked_up / self.size))


def _mixed(hash: Tensor, number: Tensor) -> Tensor:
    """A hash of both; int64 products wrap around."""
    for _ in range(2):
        hash = (hash ^ ((hash >> 32) & HALF)) * ODD + number
    return hash ^ ((hash >> 32) & HALF)
