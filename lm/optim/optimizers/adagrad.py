"""Adagrad, the paper's optimizer (section 5): the accumulator starts at 1e-5, and L2 decay is added after clipping.

The word embedding can be updated in three ways (`optim.embedding_update`):

- `sparse`: an accumulator per element; only the batch's rows are touched. Decay is lazy: a row that was idle for n
  steps is multiplied by (1 - lr wd / sqrt(acc))^n when it is next read or when `apply_pending_decay` is called. That
  is what the dense form does to it, but for the decay's own share in the accumulator (of the order of wd^2).
- `rowwise`: an accumulator per word, fed with the mean square of each occurrence's gradient; not clipped, not decayed.
- `dense`: the table is an ordinary parameter.

Shapes: U distinct rows of a batch, N uses of them, E width, V rows of the table.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.optim.adagrad import adagrad

from lm.config.groups import OptimConfig
from lm.config.registry import plugin
from lm.config.rules import Range
from lm.optim.optimizer import DenseUpdate, Optimizer, RowUpdate
from lm.optim.sparse_table import SparseTable

ACCUMULATOR_START = 1e-5
"""As in the paper's and the released settings: with torch's 0, decay alone would move an idle row by lr at once."""
EPSILON = 1e-10


class EmbeddingUpdate(Enum):
    """How the word embedding is updated; see above."""

    sparse = "sparse"
    rowwise = "rowwise"
    dense = "dense"


@dataclass
class AdagradConfig(OptimConfig):
    """Adagrad with global-norm clipping."""

    weight_decay: Annotated[float, Range(least=0)] = 1e-6
    """L2 decay, added to the gradient after clipping."""
    embedding_update: EmbeddingUpdate = EmbeddingUpdate.sparse
    """`sparse` updates the batch's rows, `rowwise` with one accumulator per word, `dense` the whole table."""

    @property
    def sparse_tables(self) -> bool:
        return self.embedding_update is not EmbeddingUpdate.dense

    def problems(self) -> Iterator[str]:
        # Lazy decay multiplies an idle row by 1 - lr wd / sqrt(1e-5) a step, which must stay positive.
        if self.embedding_update is EmbeddingUpdate.sparse and self.lr * self.weight_decay >= 3e-3:
            too_large, usual = ("lr", 0.1) if self.lr > 1 else ("weight_decay", 1e-6)
            yield (
                "optim.lr times optim.weight_decay must be below 0.003 with optim.embedding_update=sparse; got "
                f"optim.lr={self.lr:g} and optim.weight_decay={self.weight_decay:g}. Try optim.{too_large}={usual:g}"
            )


@plugin("optim", "adagrad", AdagradConfig)
class Adagrad(Optimizer):
    """Adagrad on everything; the word embedding in one of three forms."""

    config: AdagradConfig

    def dense_update(self, parameters: list[nn.Parameter]) -> DenseUpdate:
        return DenseAdagrad(parameters, weight_decay=self.config.weight_decay)

    def row_update(self, name: str, table: SparseTable) -> RowUpdate:
        # The form is the word embedding's; other tables (the sampled softmax's) are treated as dense parameters are.
        is_input = name.partition(".")[0] == "input"
        if is_input and self.config.embedding_update is EmbeddingUpdate.rowwise:
            return RowwiseAdagrad(table, self)
        return SparseAdagrad(table, self)

    @classmethod
    @torch.no_grad()
    def finish_weights(cls, model: nn.Module, state: dict[str, Any], config: AdagradConfig) -> None:
        """A run that was stopped between evaluations saves rows whose decay is still pending."""
        for name, table in state["tables"].items():
            if "decayed" in table:
                weight = model.get_parameter(f"{name}.weight")
                idle_V = state["step"] - table["decayed"]
                decay = pending_decay(table["accumulator"], idle_V, rate=state["lr"] * config.weight_decay)
                weight.mul_(decay.to(weight.device))


class DenseAdagrad(DenseUpdate):
    """torch's Adagrad on whole parameters.

    Through its function, because the class imports torch's compiler, which takes longer than torch itself.
    """

    def __init__(self, parameters: list[nn.Parameter], *, weight_decay: float) -> None:
        super().__init__(parameters)
        self.weight_decay = weight_decay
        # The fused kernel refuses the meta device, on which a step is only traced.
        self.fused = parameters[0].device.type != "meta"
        self.state = {
            number: {
                "step": torch.zeros((), device=parameter.device if self.fused else "cpu"),
                "sum": torch.full_like(parameter, ACCUMULATOR_START, requires_grad=False),
            }
            for number, parameter in enumerate(parameters)
        }

    def step(self, *, lr: float, divisor: Tensor, frozen: Tensor) -> None:
        """Update from the gradients divided by `divisor`, unless frozen, and drop them."""
        used = [number for number, parameter in enumerate(self.parameters) if parameter.grad is not None]
        gradients = self.gradients()
        if not self.fused:
            torch._foreach_div_(gradients, divisor)
        adagrad(
            [self.parameters[number] for number in used],
            gradients,
            [self.state[number]["sum"] for number in used],
            [self.state[number]["step"] for number in used],
            fused=self.fused,
            foreach=not self.fused,
            # The kernel divides by the one and skips its work on the other, both without a pass or a sync of their own.
            grad_scale=divisor.float() if self.fused else None,
            found_inf=frozen.float() if self.fused else None,
            has_sparse_grad=False,
            lr=lr,
            weight_decay=self.weight_decay,
            lr_decay=0.0,
            eps=EPSILON,
            maximize=False,
        )
        for parameter in self.parameters:
            parameter.grad = None


class SparseAdagrad(RowUpdate):
    """An accumulator per element, lazy decay: the dense form at the cost of the batch's rows."""

    def __init__(self, table: SparseTable, optimizer: Adagrad) -> None:
        super().__init__(table, optimizer)
        self.weight_decay = optimizer.config.weight_decay
        self.state = {"accumulator": torch.full_like(table.weight, ACCUMULATOR_START)}
        if self.weight_decay:
            self.state["decayed"] = torch.zeros(len(table.weight), dtype=torch.int32, device=table.weight.device)
            """The step up to which a row's decay has been applied."""
            table.before_reading = self._apply_pending_decay_of

    def step(self, *, divisor: Tensor, scale: float) -> None:  # noqa: ARG002
        rows_U, optimizer = self.rows_U, self.optimizer
        old_UE, old_accumulator_UE = self.table.weight[rows_U], self.state["accumulator"][rows_U]
        grad_UE = self.grad_UE / divisor
        if self.weight_decay:
            grad_UE = grad_UE.add_(old_UE, alpha=self.weight_decay)
            self.state["decayed"][rows_U] = optimizer.step_count
        accumulator_UE = old_accumulator_UE.addcmul(grad_UE, grad_UE)
        weight_UE = old_UE.addcdiv(grad_UE, accumulator_UE.sqrt().add_(EPSILON), value=-optimizer.lr)
        self.table.weight[rows_U] = torch.where(optimizer.frozen, old_UE, weight_UE)
        self.state["accumulator"][rows_U] = torch.where(optimizer.frozen, old_accumulator_UE, accumulator_UE)

    def apply_pending_decay(self) -> None:
        if self.weight_decay:
            self.table.weight.mul_(self._decay(self.state["accumulator"], self.state["decayed"]))
            self.state["decayed"].fill_(self.optimizer.step_count)

    @torch.no_grad()
    def _apply_pending_decay_of(self, rows_U: Tensor) -> None:
        """What `apply_pending_decay` does, for the rows that the coming step reads."""
        self.table.weight[rows_U] *= self._decay(self.state["accumulator"][rows_U], self.state["decayed"][rows_U])
        self.state["decayed"][rows_U] = self.optimizer.step_count

    def _decay(self, accumulator: Tensor, decayed: Tensor) -> Tensor:
        idle = (self.optimizer.step_count - decayed) * ~self.optimizer.frozen
        return pending_decay(accumulator, idle, rate=self.optimizer.lr * self.weight_decay)


def pending_decay(accumulator_UE: Tensor, idle_U: Tensor, *, rate: float) -> Tensor:
    """(1 - rate / sqrt(acc))^idle with rate = lr wd, through the logarithm because the base is next to 1."""
    return accumulator_UE.rsqrt().mul_(-rate).log1p_().mul_(idle_U[:, None]).exp_()


class RowwiseAdagrad(RowUpdate):
    """An accumulator per word, fed with the mean square of each occurrence's gradient; not clipped, not decayed."""

    clipped = False

    def __init__(self, table: SparseTable, optimizer: "Optimizer") -> None:
        super().__init__(table, optimizer)
        self.state = {"accumulator": table.weight.new_full((len(table.weight),), ACCUMULATOR_START)}

    def step(self, *, divisor: Tensor, scale: float) -> None:  # noqa: ARG002
        rows_U = self.rows_U
        old_U, old_UE = self.state["accumulator"][rows_U], self.table.weight[rows_U]
        if self.inverse_N is None:  # the rows were read once for all their occurrences, and are averaged over the ranks
            accumulator_U = old_U + self.grad_UE.square().mean(-1).mul_(scale**2)
        else:
            square_N = self.grad_NE.square().mean(-1)
            added_U = torch.zeros_like(old_U).index_add_(0, self.inverse_N, square_N)
            # A rank's gradient is that of the mean over its own tokens, as many times larger as there are ranks.
            ranks = self.optimizer.ranks
            accumulator_U = old_U + ranks.sum(added_U).mul_((scale / ranks.size) ** 2)
        step_size = self.optimizer.lr * scale
        weight_UE = old_UE.addcdiv(self.grad_UE, accumulator_U.sqrt().add_(EPSILON)[:, None], value=-step_size)
        self.table.weight[rows_U] = torch.where(self.optimizer.frozen, old_UE, weight_UE)
        self.state["accumulator"][rows_U] = torch.where(self.optimizer.frozen, old_U, accumulator_U)
