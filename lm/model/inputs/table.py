"""A table with one trained vector per word, or the output layer's vectors if tied."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from lm.config.groups import InputConfig, plugin
from lm.data.batches import DistinctWords
from lm.model.base import Input, InputSizes
from lm.optim.sparse_table import SparseTable


@dataclass
class TableConfig(InputConfig):
    """One vector per word."""

    name: str = "table"
    tied_with = "full"


@plugin("input", "table", TableConfig)
class TableInput(SparseTable, Input):
    """Word vectors, initialized to U(-0.1, 0.1)."""

    def __init__(self, vocab_size: int, width: int, *, sparse: bool = True) -> None:
        super().__init__(vocab_size, width, sparse=sparse)
        self.width = width
        nn.init.uniform_(self.weight, -0.1, 0.1)

    @classmethod
    def build(cls, settings: TableConfig, sizes: InputSizes) -> Input:
        if sizes.tied:
            return TiedTable(sizes.width, sizes.output.word_vectors)
        return cls(len(sizes.vocabulary), sizes.width, sparse=sizes.sparse)

    def rows_by_word(self) -> list[tuple[Tensor, list[int]]]:
        return [(self.weight, list(range(len(self.weight))))]

    def forward(self, words: Tensor, distinct: DistinctWords | None = None) -> Tensor:  # type: ignore[override]
        used = (distinct.words_U, distinct.uses) if distinct is not None else ()
        return SparseTable.forward(self, words, *used)


class TiedTable(Input):
    """Shares the output layer's word vectors; their gradient sums both uses."""

    def __init__(self, width: int, word_vectors: Callable[[], list[Tensor]]) -> None:
        super().__init__()
        self.width, self.word_vectors = width, word_vectors

    @classmethod
    def build(cls, settings: TableConfig, sizes: InputSizes) -> "TiedTable":
        return cls(sizes.width, sizes.output.word_vectors)

    def forward(self, words: Tensor, distinct: DistinctWords | None = None) -> Tensor:
        (weight_VE,) = self.word_vectors()
        return F.embedding(words, weight_VE)
