"""The smallest model with an embedding table and a dense parameter, and batches for it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lm.config.groups import OptimConfig
from lm.data.batches import Uses
from lm.optim.optimizer import build_optimizer
from lm.optim.sparse_table import SparseTable

WORDS, WIDTH = 23, 4


class Toy(nn.Module):
    """An embedding table and a linear core: the smallest model with both kinds of parameters."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.input = SparseTable(WORDS, WIDTH, sparse=sparse)
        nn.init.uniform_(self.input.weight, -0.1, 0.1)
        self.core = nn.Linear(WIDTH, 3, bias=False)

    def loss(self, words_N: Tensor) -> Tensor:
        rows_U, inverse_N = torch.unique(words_N, return_inverse=True)
        return loss_of(self.core(self.input(words_N, rows_U, Uses.of(inverse_N, num_rows=len(rows_U)))), words_N)


def loss_of(logits_N3: Tensor, words_N: Tensor) -> Tensor:
    """Compute a small loss: with larger gradients, Adagrad's first steps amplify rounding errors."""
    return nn.functional.cross_entropy(logits_N3, words_N % 3) / 50


def batches(num_steps: int) -> list[Tensor]:
    """Make batches in which words recur after very different gaps, some never."""
    generator = torch.Generator().manual_seed(1)
    weights = 1 / torch.arange(1, WORDS + 1).float() ** 2
    weights[-1] = 0
    return [torch.multinomial(weights, 6, replacement=True, generator=generator) for _ in range(num_steps)]


def train(config: OptimConfig, *, num_steps: int, rate: Callable[[int], float] = lambda _: 0.1) -> Toy:
    model = Toy(sparse=(config.embedding != "dense"))
    optimizer = build_optimizer(model, config)
    for step, words_N in enumerate(batches(num_steps)):
        loss = model.loss(words_N)
        loss.backward()
        optimizer.step(loss.detach(), lr=rate(step), num_steps=1)
    optimizer.apply_pending_decay()
    return model
