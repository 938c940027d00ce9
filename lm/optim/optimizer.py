"""Adagrad for dense parameters and for the rows of word tables, clipped by the global norm (section 5 of the paper).

Order of a step: clip the gradient, add L2 decay to it, Adagrad. The gradients that arrive are those of the mean loss
per token. Making them those of the objective (`optim.reduction`) costs nothing, because every update divides by a
clipping factor anyway. The word table has three forms:

- `sparse`: an accumulator per element; only the batch's rows are touched. Decay is lazy: a row that was idle for n
  steps is multiplied by (1 - lr wd / sqrt(acc))^n when it is next read or when `settle` is called, which is what the
  dense form does to it, but for the decay's own share in the accumulator (of the order of wd^2).
- `rowwise`: an accumulator per word, fed with the mean square of each occurrence's gradient; not clipped, not decayed.
- `dense`: the table is an ordinary parameter.

Nothing here asks the device for a number. A non-finite loss or gradient is noted on the device and masks every update
from that step on; the trainer reads the note when it reads the loss.

Shapes: U distinct rows of a batch, N uses of them, E width, V rows of the table.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim.adagrad import adagrad

from lm.config.model import EmbeddingUpdate, OptimConfig, Reduction, Schedule
from lm.optim.row_table import SparseTable
from lm.system.ranks import Ranks

ACCUMULATOR_START = 1e-5
"""As in the paper's and the released settings: with torch's 0, decay alone would move an idle row by lr at once."""
EPSILON = 1e-10


def learning_rate(config: OptimConfig, *, epoch: int, max_epochs: int | None) -> float:
    """The learning rate of an epoch, counted from 0."""
    if config.schedule is Schedule.constant:
        return config.lr
    assert max_epochs is not None
    # Halved after each epoch from the middle one on: of 10 epochs, the sixth is the first to be halved.
    return config.lr * 0.5 ** max(0, epoch + 1 - -(-max_epochs // 2))


class Optimizer:
    """One Adagrad over a model's dense parameters and its row tables."""

    def __init__(self, model: nn.Module, config: OptimConfig, *, ranks: Ranks | None = None) -> None:
        dense = [p for p in model.parameters() if p.requires_grad]
        device = dense[0].device
        self.config = config
        self.ranks = ranks or Ranks()
        self.lr = config.lr
        self.dense = DenseAdagrad(dense, weight_decay=config.weight_decay)
        self.step_count = 0
        self.grad_norm = torch.zeros((), device=device)
        """Global norm of the objective's gradient in the last step, before clipping."""
        self.bad_step = torch.full((), -1, dtype=torch.int64, device=device)
        """The first step whose loss or gradient was not finite; -1 while there is none."""
        self.tables = {
            # The form is the word embedding's; other tables (the sampled softmax's) are part of the dense side.
            name: RowwiseAdagrad(table, self)
            if name == "embedding" and config.embedding_update is EmbeddingUpdate.rowwise
            else SparseAdagrad(table, self)
            for name, table in model.named_modules()
            if isinstance(table, SparseTable) and table.by_rows
        }
        self.whole_tables = [m.weight for m in model.modules() if isinstance(m, SparseTable) and not m.by_rows]
        """Word tables in the literal form, whose gradients the ranks must average whole."""

    @property
    def frozen(self) -> Tensor:
        """Whether updates are masked, as the device knows it."""
        return self.bad_step >= 0

    @torch.no_grad()
    def step(self, loss: Tensor, *, lr: float, num_steps: int) -> None:
        """Update all parameters from the gradients of the mean loss over a batch of `num_steps` steps, and drop them.

        With several ranks the loss and the gradients of all but the word tables are averaged over them already.
        """
        self._set_lr(lr)
        self.step_count += 1
        scale = num_steps if self.config.reduction is Reduction.stream else 1
        for weight in self.whole_tables:
            assert weight.grad is not None
            self.ranks.mean(weight.grad)
        used = [table for table in self.tables.values() if table.collect()]
        gradients = self.dense.gradients()
        gradients += [table.grad_UE for table in used if table.clipped]
        self.grad_norm = get_total_norm(gradients) * scale
        unclipped = sum(table.grad_UE.sum() for table in used if not table.clipped)
        bad = ~torch.isfinite(self.grad_norm + loss + unclipped)
        self.bad_step = torch.where((self.bad_step < 0) & bad, self.step_count, self.bad_step)
        divisor = self._clip_divisor() / scale
        self.dense.step(lr=lr, divisor=divisor, frozen=self.frozen)
        for table in used:
            table.step(divisor=divisor, scale=scale)

    @torch.no_grad()
    def apply_pending_decay(self) -> None:
        """Catch up with the decay that idle rows are owed, so that the weights are the true ones."""
        for table in self.tables.values():
            table.apply_pending_decay()

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain numbers only."""
        return {
            "step": self.step_count,
            "lr": self.lr,
            "dense": self.dense.state,
            "tables": {name: table.state for name, table in self.tables.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step_count, self.lr = state["step"], state["lr"]
        own = self.state_dict()
        for kind in ("dense", "tables"):
            for name, tensors in own[kind].items():
                for key, tensor in tensors.items():
                    tensor.copy_(state[kind][name][key])

    def _set_lr(self, lr: float) -> None:
        if lr != self.lr:
            self.apply_pending_decay()  # what is owed was earned at the old rate
            self.lr = lr

    def _clip_divisor(self) -> Tensor:
        """What the objective's gradients are divided by so that their global norm is at most `clip`."""
        if self.config.max_grad_norm is None:
            return torch.ones_like(self.grad_norm)
        return (self.grad_norm / self.config.max_grad_norm).clamp(min=1)


class DenseAdagrad:
    """torch's Adagrad on whole parameters.

    Through its function, because the class imports torch's compiler, which takes longer than torch itself.
    """

    def __init__(self, parameters: list[nn.Parameter], *, weight_decay: float) -> None:
        self.parameters, self.weight_decay = parameters, weight_decay
        # The fused kernel refuses the meta device, on which a step is only traced.
        self.fused = parameters[0].device.type != "meta"
        self.state = {
            number: {
                "step": torch.zeros((), device=parameter.device if self.fused else "cpu"),
                "sum": torch.full_like(parameter, ACCUMULATOR_START, requires_grad=False),
            }
            for number, parameter in enumerate(parameters)
        }

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

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


class RowAdagrad(ABC):
    """Adagrad on the rows that a step used of one table: what both forms share."""

    clipped = True
    """Whether the rows' gradient counts in the global norm and is clipped."""

    def __init__(self, table: SparseTable, optimizer: "Optimizer") -> None:
        self.table, self.optimizer = table, optimizer
        self.state: dict[str, Tensor] = {}

    def collect(self) -> bool:
        """Take the step's rows and sum their gradients per row; False if the table was not used."""
        used = self.table.take_used()
        if used is None:
            return False
        assert used.values.grad is not None
        self.rows_U, self.inverse_N = used.rows_U, used.inverse_N
        self.grad_NE = used.values.grad.flatten(0, -2)
        if used.inverse_N is None:
            self.grad_UE = self.grad_NE
        else:
            zeros_UE = self.grad_NE.new_zeros(len(used.rows_U), self.grad_NE.shape[1])
            self.grad_UE = zeros_UE.index_add_(0, used.inverse_N, self.grad_NE)
        self.optimizer.ranks.mean(self.grad_UE)  # all ranks have the same rows in the same order
        return True

    @abstractmethod
    def step(self, *, divisor: Tensor, scale: float) -> None:
        """Update the rows from `grad_UE` divided by `divisor`, or, where they are not clipped, times `scale`."""

    def apply_pending_decay(self) -> None:  # noqa: B027
        """Nothing is owed unless decay is lazy."""


class SparseAdagrad(RowAdagrad):
    """An accumulator per element, lazy decay: the dense form at the cost of the batch's rows."""

    def __init__(self, table: SparseTable, optimizer: "Optimizer") -> None:
        super().__init__(table, optimizer)
        self.weight_decay = optimizer.config.weight_decay
        self.state = {"accumulator": torch.full_like(table.weight, ACCUMULATOR_START)}
        if self.weight_decay:
            self.state["settled"] = torch.zeros(len(table.weight), dtype=torch.int32, device=table.weight.device)
            """The step up to which a row's decay is accounted for."""
            table.before_reading = self._apply_pending_decay_of

    def step(self, *, divisor: Tensor, scale: float) -> None:  # noqa: ARG002
        rows_U, optimizer = self.rows_U, self.optimizer
        old_UE, old_accumulator_UE = self.table.weight[rows_U], self.state["accumulator"][rows_U]
        grad_UE = self.grad_UE / divisor
        if self.weight_decay:
            grad_UE = grad_UE.add_(old_UE, alpha=self.weight_decay)
            self.state["settled"][rows_U] = optimizer.step_count
        accumulator_UE = old_accumulator_UE.addcmul(grad_UE, grad_UE)
        weight_UE = old_UE.addcdiv(grad_UE, accumulator_UE.sqrt().add_(EPSILON), value=-optimizer.lr)
        self.table.weight[rows_U] = torch.where(optimizer.frozen, old_UE, weight_UE)
        self.state["accumulator"][rows_U] = torch.where(optimizer.frozen, old_accumulator_UE, accumulator_UE)

    def apply_pending_decay(self) -> None:
        if self.weight_decay:
            self.table.weight.mul_(self._decay(self.state["accumulator"], self.state["settled"]))
            self.state["settled"].fill_(self.optimizer.step_count)

    @torch.no_grad()
    def _apply_pending_decay_of(self, rows_U: Tensor) -> None:
        """What `settle` does, for the rows that the coming step reads."""
        self.table.weight[rows_U] *= self._decay(self.state["accumulator"][rows_U], self.state["settled"][rows_U])
        self.state["settled"][rows_U] = self.optimizer.step_count

    def _decay(self, accumulator: Tensor, settled: Tensor) -> Tensor:
        idle = (self.optimizer.step_count - settled) * ~self.optimizer.frozen
        return pending_decay(accumulator, idle, rate=self.optimizer.lr * self.weight_decay)


def pending_decay(accumulator_UE: Tensor, idle_U: Tensor, *, rate: float) -> Tensor:
    """(1 - rate / sqrt(acc))^idle with rate = lr wd, through the logarithm because the base is next to 1."""
    return accumulator_UE.rsqrt().mul_(-rate).log1p_().mul_(idle_U[:, None]).exp_()


class RowwiseAdagrad(RowAdagrad):
    """An accumulator per word, fed with the mean square of each occurrence's gradient; not clipped, not decayed."""

    clipped = False

    def __init__(self, table: SparseTable, optimizer: "Optimizer") -> None:
        super().__init__(table, optimizer)
        self.state = {"accumulator": table.weight.new_full((len(table.weight),), ACCUMULATOR_START)}

    def step(self, *, divisor: Tensor, scale: float) -> None:  # noqa: ARG002
        rows_U = self.rows_U
        square_N = self.grad_NE.square().mean(-1)
        old_U, old_UE = self.state["accumulator"][rows_U], self.table.weight[rows_U]
        added_U = (
            square_N if self.inverse_N is None else torch.zeros_like(old_U).index_add_(0, self.inverse_N, square_N)
        )
        # A rank's gradient is that of the mean over its own tokens, as many times larger as there are ranks.
        ranks = self.optimizer.ranks
        accumulator_U = old_U + ranks.sum(added_U).mul_((scale / ranks.size) ** 2)
        step_size = self.optimizer.lr * scale
        weight_UE = old_UE.addcdiv(self.grad_UE, accumulator_U.sqrt().add_(EPSILON)[:, None], value=-step_size)
        self.table.weight[rows_U] = torch.where(self.optimizer.frozen, old_UE, weight_UE)
        self.state["accumulator"][rows_U] = torch.where(self.optimizer.frozen, old_U, accumulator_U)
