"""The part of a training step after the backward pass: clip by the global norm, then update (section 5 of the paper).

The gradients that arrive are those of the mean loss per token. Every update divides by a clipping factor anyway, so
converting them to the objective's (`optim.reduction`) is free. Parameters are of two kinds: dense ones, updated by
torch's fused kernels, and tables whose rows are updated only if a batch used them (`sparse_table.py`).

Weight decay of tables is lazy: an idle row's decay is applied when the row is next read. Pending decay is tracked as
the cumulative learning rate (`Optimizer.rate_sum`), so a rate that changes every step costs nothing. `finish_weights`
applies what is still pending in a checkpoint.

Nothing here synchronizes with the device. A non-finite loss or gradient is recorded on the device and masks every
update from that step on; the trainer reads the record when it reads the loss.

Shapes: U distinct rows of a batch, N uses of them, E width, V rows of the table.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.utils import get_total_norm

from lm.config.groups import EmbeddingUpdate, OptimConfig, Reduction
from lm.config.registry import find_plugin
from lm.optim.sparse_table import SparseTable, fill_rows, row_blocks
from lm.system.ranks import Ranks


def build_optimizer(model: nn.Module, config: OptimConfig, *, ranks: Ranks | None = None) -> "Optimizer":
    """The optimizer that `optim=NAME` names, for all trained parameters of a model."""
    kind: type[Optimizer] = find_plugin("optim", config.name).target
    return kind(model, config, ranks=ranks)


class Optimizer(ABC):
    """One update rule over a model's dense parameters and its sparse tables: what all optimizers share."""

    def __init__(self, model: nn.Module, config: OptimConfig, *, ranks: Ranks | None = None) -> None:
        dense = [p for p in model.parameters() if p.requires_grad]
        device = dense[0].device
        self.config = config
        self.ranks = ranks or Ranks()
        self.lr = config.lr
        self.dense = self.dense_update(dense)
        self.step_count = 0
        self.rate_sum = 0.0
        """Sum of the rates of all steps, in units of `optim.lr`, so that a step at a constant rate counts 1."""
        self.grad_norm = torch.zeros((), device=device)
        """Global norm of the objective's gradient in the last step, before clipping."""
        self.bad_step = torch.full((), -1, dtype=torch.int64, device=device)
        """The first step whose loss or gradient was not finite; -1 while there is none."""
        self.tables = {
            name: self.row_update(name, table)
            for name, table in model.named_modules()
            if isinstance(table, SparseTable) and table.by_rows
        }
        self.input_parameters = [
            p for name, p in model.named_parameters() if p.requires_grad and name.startswith("input.")
        ]
        """The input's dense parameters: DistributedDataParallel does not see them, so the ranks average them here."""

    @abstractmethod
    def dense_update(self, parameters: list[nn.Parameter]) -> "DenseUpdate":
        """The rule for whole parameters."""

    @abstractmethod
    def row_update(self, name: str, table: SparseTable) -> "RowUpdate":
        """The rule for the rows of a table; the `name` of a table of the input begins with `input`."""

    def by_word(self, name: str) -> bool:
        """Whether the rows of this table have one second moment each.

        Only the word embedding can have that; other tables (the sampled softmax's) keep one per element.
        """
        return name.partition(".")[0] == "input" and self.config.embedding is EmbeddingUpdate.rowwise

    @classmethod
    def pending_decay(cls, state: dict[str, Tensor], rows: Tensor | slice, idle_U: Tensor, config: Any) -> Tensor:
        """What rows are multiplied by that were idle for so many steps at `optim.lr`; see `lazy_decay.py`."""
        raise NotImplementedError

    @classmethod
    @torch.no_grad()
    def finish_weights(cls, model: nn.Module, state: dict[str, Any], config: Any) -> None:
        """Apply to a loaded model the decay that is still pending in a checkpoint's optimizer state."""
        for name, table in state["tables"].items():
            if "decayed" in table:
                weight = model.get_parameter(f"{name}.weight")
                idle_V = (state["rate_sum"] - table["decayed"]).float()
                for rows in row_blocks(len(weight)):
                    weight[rows] *= cls.pending_decay(table, rows, idle_V[rows], config).to(weight.device)

    @property
    def frozen(self) -> Tensor:
        """Whether updates are masked, as the device knows it."""
        return self.bad_step >= 0

    @torch.no_grad()
    def step(self, loss: Tensor, *, lr: float, num_steps: int) -> None:
        """Update all parameters from the gradients of the mean loss over a batch of `num_steps` steps, and drop them.

        With several ranks the loss and the gradients of all but the word tables are averaged over them already.
        """
        self.lr = lr
        self.step_count += 1
        self.rate_sum += lr / self.config.lr
        scale = num_steps if self.config.reduction is Reduction.stream else 1
        for parameter in self.input_parameters:
            assert parameter.grad is not None
            self.ranks.mean(parameter.grad)
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
        """Apply the decay of idle rows, so that the weights are the true ones."""
        for table in self.tables.values():
            table.apply_pending_decay()

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain numbers only."""
        return {
            "step": self.step_count,
            "lr": self.lr,
            "rate_sum": self.rate_sum,
            "dense": self.dense.state,
            "tables": {name: table.state for name, table in self.tables.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step_count, self.lr, self.rate_sum = state["step"], state["lr"], state["rate_sum"]
        own = self.state_dict()
        for kind in ("dense", "tables"):
            for name, tensors in own[kind].items():
                for key, tensor in tensors.items():
                    tensor.copy_(state[kind][name][key])

    def _clip_divisor(self) -> Tensor:
        """What the objective's gradients are divided by so that their global norm is at most `max_grad_norm`."""
        if self.config.max_grad_norm is None:
            return torch.ones_like(self.grad_norm)
        return (self.grad_norm / self.config.max_grad_norm).clamp(min=1)


class DenseUpdate(ABC):
    """An update rule for whole parameters."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.state: dict[int, dict[str, Tensor]] = {}
        """By the parameter's number."""

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    @abstractmethod
    def step(self, *, lr: float, divisor: Tensor, frozen: Tensor) -> None:
        """Update from the gradients divided by `divisor`, unless frozen, and drop them."""


class RowUpdate(ABC):
    """An update rule for the rows that a step used of one table."""

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
        """Nothing is pending unless decay is lazy."""


class FusedUpdate(DenseUpdate):
    """One call of a kernel for all parameters; `start` says at which numbers each kind of state begins."""

    def __init__(self, parameters: list[nn.Parameter], *, start: dict[str, float]) -> None:
        super().__init__(parameters)
        # The fused kernels need no memory, and cannot run on tensors without data, on which a step is only traced.
        self.traced = parameters[0].is_meta or isinstance(parameters[0], FakeTensor)
        self.state = {
            number: {
                "step": torch.zeros((), device=parameter.device),
                **{key: torch.full_like(parameter, value, requires_grad=False) for key, value in start.items()},
            }
            for number, parameter in enumerate(parameters)
        }

    @abstractmethod
    def update(
        self, weights: list[Tensor], gradients: list[Tensor], state: dict[str, list[Tensor]], **options: Any
    ) -> None:
        """Call torch's function with this optimizer's settings and with the options common to all of them."""

    def step(self, *, lr: float, divisor: Tensor, frozen: Tensor) -> None:
        used = [number for number, parameter in enumerate(self.parameters) if parameter.grad is not None]
        if not self.traced:
            self.update(
                [self.parameters[number] for number in used],
                self.gradients(),
                {key: [self.state[number][key] for number in used] for key in self.state[0]},
                fused=True,
                foreach=False,
                # The kernel divides by the first and is masked by the second, without an extra pass or a sync.
                grad_scale=divisor.float(),
                found_inf=frozen.float(),
                lr=lr,
                maximize=False,
            )
        for parameter in self.parameters:
            parameter.grad = None


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
