"""Tables of word vectors that read and update only a few rows per training step.

A dense gradient of an 800,000-row table costs more than the rest of the step. Here, the rows used by a batch are
gathered into a small leaf tensor. Autograd computes the leaf's gradient, and the optimizer updates the same rows of
the table. The host computes which rows a batch uses, so nothing synchronizes with the device.

Shapes: U distinct rows in a batch, N uses of them, V rows in the table, E width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm.data.batches import Uses

BLOCK_ROWS = 1 << 14
"""Rows per block, for whole-table operations that need temporary memory."""


def row_blocks(num_rows: int) -> list[slice]:
    return [slice(start, start + BLOCK_ROWS) for start in range(0, num_rows, BLOCK_ROWS)]


def fill_rows(values_V: Tensor, rows: Tensor | slice, value: float) -> None:
    """`values_V[rows] = value`, without the GPU synchronization of a plain assignment."""
    if isinstance(rows, slice):
        values_V[rows].fill_(value)
    else:
        values_V.index_fill_(0, rows, value)


@dataclass(frozen=True)
class UsedRows:
    """Table rows read in a step."""

    rows_U: Tensor
    """Distinct row ids."""
    uses: Uses | None
    """Uses of each row; None if every row is used exactly once, in that order."""
    values: Tensor
    """Leaf tensor that receives the gradient: (N, E), or (U, E) if `uses` is None."""


class SparseTable(nn.Module):
    """A (V, E) table whose training step costs time only for the batch's rows.

    With `sparse=False` the table is an ordinary parameter with a dense gradient.
    """

    def __init__(self, num_rows: int, width: int, *, sparse: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, width), requires_grad=not sparse)
        self.sparse = sparse
        self.before_reading: list[Callable[[Tensor], None]] = []
        """Hooks called with row ids before each lookup, for lazy decay."""
        self.used: UsedRows | None = None

    def forward(self, index_N: Tensor, rows_U: Tensor | None = None, uses: Uses | None = None) -> Tensor:
        """Return the rows at `index_N` (any shape); sparse training needs `rows_U`, and `uses` for repeats."""
        if not (self.sparse and self.training and torch.is_grad_enabled()):
            return F.embedding(index_N, self.weight)
        assert rows_U is not None, "sparse training needs the distinct rows of the batch"
        if self.used is not None and self.used.rows_U is rows_U:
            return self.used.values  # another group of the same step: gradients accumulate in the same leaf
        assert self.used is None, "the last step's rows have not been taken by the optimizer"
        for hook in self.before_reading:
            hook(rows_U)
        values = F.embedding(index_N, self.weight).requires_grad_()
        self.used = UsedRows(rows_U, uses, values)
        return values

    def take_used(self) -> UsedRows | None:
        """Return the last step's rows; a second call returns None."""
        used, self.used = self.used, None
        return used
