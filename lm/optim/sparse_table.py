"""Tables of word vectors whose training step reads and changes only a few rows.

A dense gradient of an 800,000-row table costs more than the rest of the step. Here the rows that a batch uses are
gathered into a small leaf tensor; autograd fills in the gradient of that leaf, and the optimizer updates the same rows
of the table. The host computes which rows a batch uses, so nothing synchronizes with the device.

Shapes: U distinct rows of a batch, N uses of them, V rows of the table, E width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BLOCK_ROWS = 1 << 14
"""Rows of a block, for work on whole tables that needs temporary memory."""


def row_blocks(num_rows: int) -> list[slice]:
    return [slice(start, start + BLOCK_ROWS) for start in range(0, num_rows, BLOCK_ROWS)]


def fill_rows(values_V: Tensor, rows: Tensor | slice, value: float) -> None:
    """`values_V[rows] = value` without the synchronization that the assignment causes on a GPU."""
    if isinstance(rows, slice):
        values_V[rows].fill_(value)
    else:
        values_V.index_fill_(0, rows, value)


@dataclass(frozen=True)
class UsedRows:
    """The rows that a step reads of a table."""

    rows_U: Tensor
    """Distinct row ids."""
    inverse_N: Tensor | None
    """For each use, its position in `rows_U`; None if every row is used exactly once, in that order."""
    values: Tensor
    """Leaf tensor that receives the gradient: (N, E), or (U, E) if `inverse_N` is None."""


class SparseTable(nn.Module):
    """A (V, E) table whose training step costs the batch's rows, not the table.

    With `sparse=False` the table is an ordinary parameter with a dense gradient.
    """

    def __init__(self, num_rows: int, width: int, *, sparse: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, width), requires_grad=not sparse)
        self.sparse = sparse
        self.before_reading: list[Callable[[Tensor], None]] = []
        """Hooks called with row ids before each lookup, for lazy decay."""
        self.used: UsedRows | None = None

    def forward(self, index_N: Tensor, rows_U: Tensor | None = None, inverse_N: Tensor | None = None) -> Tensor:
        """The rows at `index_N`, of any shape; sparse training needs the distinct rows, and `inverse_N` for repeats."""
        if not (self.sparse and self.training and torch.is_grad_enabled()):
            return F.embedding(index_N, self.weight)
        assert rows_U is not None, "sparse training needs the distinct rows of the batch"
        if self.used is not None and self.used.rows_U is rows_U:
            return self.used.values  # another group of the same step: gradients add up in the same leaf
        assert self.used is None, "the last step's rows have not been taken by the optimizer"
        for hook in self.before_reading:
            hook(rows_U)
        values = F.embedding(index_N, self.weight).requires_grad_()
        self.used = UsedRows(rows_U, None if inverse_N is None else inverse_N.flatten(), values)
        return values

    def take_used(self) -> UsedRows | None:
        """The rows of the last step; a second call returns None."""
        used, self.used = self.used, None
        return used
