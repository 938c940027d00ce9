"""Lazy weight decay: a step touches only the rows it uses; an idle row's decay is applied when it is next read.

What a row owes is counted by the sum of the rates (`Optimizer.rate_sum`), so a rate that changes every step costs
nothing either. Weights that leave training before they are read again are finished by `Optimizer.finish_weights`.

Shapes: U rows, V rows of the table, E width.
"""

import torch
from torch import Tensor

from lm.optim.optimizer import Optimizer, RowUpdate
from lm.optim.sparse_table import SparseTable, fill_rows, row_blocks


class LazyDecay(RowUpdate):
    """Rows whose decay is pending while they are idle; how much of it, `Optimizer.pending_decay` says."""

    def __init__(self, table: SparseTable, optimizer: Optimizer, *, weight_decay: float) -> None:
        super().__init__(table, optimizer)
        self.weight_decay = weight_decay
        if weight_decay:
            self.state["decayed"] = torch.zeros(len(table.weight), dtype=torch.float64, device=table.weight.device)
            """The sum of rates up to which a row's decay has been applied."""
            table.before_reading.append(self._apply)

    def mark_decayed(self, rows: Tensor | slice) -> None:
        """These rows owe nothing any more."""
        if self.weight_decay:
            fill_rows(self.state["decayed"], rows, self.optimizer.rate_sum)

    def apply_pending_decay(self) -> None:
        if self.weight_decay:
            for rows in row_blocks(len(self.table.weight)):
                self._apply(rows)

    @torch.no_grad()
    def _apply(self, rows: Tensor | slice) -> None:
        optimizer = self.optimizer
        idle_U = (optimizer.rate_sum - self.state["decayed"][rows]) * ~optimizer.frozen
        self.table.weight[rows] *= optimizer.pending_decay(self.state, rows, idle_U.float(), optimizer.config)
        self.mark_decayed(rows)
