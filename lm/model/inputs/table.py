"""A table with one trained vector per word."""

from dataclasses import dataclass

from torch import nn

from lm.config.groups import InputConfig
from lm.config.registry import plugin
from lm.model.base import Input
from lm.optim.sparse_table import SparseTable


@dataclass
class TableConfig(InputConfig):
    """One vector per word."""


@plugin("input", "table", TableConfig)
class TableInput(SparseTable, Input):
    """Word vectors, starting in U(-0.1, 0.1)."""

    def __init__(self, vocab_size: int, width: int, *, by_rows: bool = True) -> None:
        super().__init__(vocab_size, width, by_rows=by_rows)
        self.width = width
        nn.init.uniform_(self.weight, -0.1, 0.1)

    @classmethod
    def build(cls, settings: TableConfig, *, vocab_size: int, width: int, sparse: bool) -> "TableInput":  # noqa: ARG003
        return cls(vocab_size, width, by_rows=sparse)
