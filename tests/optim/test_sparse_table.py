"""Sparse tables: row gradients match the dense gradient and are returned once."""

import pytest
import torch

from lm.data.batches import Uses
from lm.optim.sparse_table import SparseTable


def test_row_gradients_match_dense_gradient() -> None:
    torch.manual_seed(0)
    sparse, dense = SparseTable(9, 3), SparseTable(9, 3, sparse=False)
    with torch.no_grad():
        sparse.weight.normal_()
        dense.weight.copy_(sparse.weight)
    words = torch.tensor([[4, 1], [4, 8]])
    rows, inverse = torch.unique(words, return_inverse=True)
    for table in (sparse, dense):
        table(words, rows, Uses.of(inverse, num_rows=len(rows))).sin().square().sum().backward()
    used = sparse.take_used()
    assert used is not None and used.uses is not None and used.values.grad is not None
    summed = used.uses.sum(used.values.grad.flatten(0, 1))
    assert sparse.weight.grad is None
    torch.testing.assert_close(summed, dense.weight.grad[rows])


def test_used_rows_are_returned_once() -> None:
    table = SparseTable(5, 2)
    words = torch.tensor([1, 2])
    first = table(words, words)
    with pytest.raises(AssertionError, match="have not been taken"):
        table(words.clone(), words.clone())
    second = table(words, words)  # another group of the same step
    (first.sum() + 2 * second.sum()).backward()
    used = table.take_used()
    assert used is not None and used.values.grad is not None
    assert used.values.grad.tolist() == [[3, 3], [3, 3]]
    assert table.take_used() is None


def test_evaluation_records_no_rows() -> None:
    table = SparseTable(5, 2)
    with torch.no_grad():
        table(torch.tensor([1, 2]))
    table.eval()
    table(torch.tensor([1, 2]))
    assert table.take_used() is None
