"""The training step after the backward pass: global-norm clipping, then the update (section 5 of the paper).

Incoming gradients are those of the mean loss per token. Every update divides by a clipping factor anyway, so
converting them to the objective (`optim.reduction`) is free. There are two kinds of parameters: dense ones, and tables
whose rows are updated only when a batch uses them (`sparse_table.py`). `Optimizer.move` implements the update for both.
Adagrad and Adam use torch's fused kernels for dense parameters instead.

Weight decay of tables is lazy: an idle row's decay is applied when the row is next read. Pending decay is tracked as
the cumulative learning rate (`Optimizer.rate_sum`), so a rate that changes every step adds no cost. `finish_weights`
applies decay that is still pending in a checkpoint.

Nothing here synchronizes with the device. A non-finite loss or gradient is recorded on the device and masks all
updates from that step on; the trainer checks for it when it reads the loss.

Shapes: U distinct rows in a batch, N uses of them, E width, V rows in the table.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from lm.config.groups import OptimConfig, find_plugin
from lm.optim.sparse_table import SparseTable, fill_rows, row_blocks
from lm.system.memory import has_data
from lm.system.ranks import Ranks

State = dict[str, Tensor]
"""Optimizer state of one weight."""


def build_optimizer(model: nn.Module, config: OptimConfig, *, ranks: Ranks | None = None) -> "Optimizer":
    """Build the optimizer selected by `optim=NAME` for the model's trainable parameters."""
    kind: type[Optimizer] = find_plugin("optim", config.name).target
    return kind(model, config, ranks=ranks)


class Optimizer(ABC):
    """Updates a model's dense parameters and the rows of its sparse tables."""

    def __init__(self, model: nn.Module, config: OptimConfig, *, ranks: Ranks | None = None) -> None:
        self.config, self.ranks, self.lr = config, ranks or Ranks(), config.lr
        self.dense = [p for p in model.parameters() if p.requires_grad]
        self.dense_states = [self.dense_state(p) for p in self.dense]
        self.step_count = 0
        self.rate_sum = 0.0
        """Cumulative learning rate in units of `optim.lr`: a step at the full rate adds 1."""
        device = self.dense[0].device
        self.grad_norm = torch.zeros((), device=device)
        """Global gradient norm of the objective in the last step, before clipping."""
        self.bad_step = torch.full((), -1, dtype=torch.int64, device=device)
        """First step with a non-finite loss or gradient; -1 if none."""
        rowwise = config.embedding == "rowwise"
        self.tables = {
            # Only the word embedding can be rowwise; other tables (e.g. sampled softmax) keep per-element moments.
            name: self.table_update(table, rowwise=name.split(".")[0] == "input" and rowwise)
            for name, table in model.named_modules()
            if isinstance(table, SparseTable) and table.sparse
        }
        self.input_parameters = [
            p for name, p in model.named_parameters() if p.requires_grad and name.startswith("input.")
        ]
        """The input's dense parameters, averaged across ranks here because DistributedDataParallel omits them."""

    # ---- update rule ----

    @abstractmethod
    def move(self, weight: Tensor, state: State, grad: Tensor) -> Tensor:
        """Return the weight after a step at rate `lr`, given a scaled and clipped gradient; updates `state`.

        May work in place. The result must equal `weight` if updates are masked (`frozen`), for any `grad`.
        """

    def dense_state(self, weight: Tensor) -> State:
        """Initial state of a dense parameter."""
        return {}

    def row_state(self, weight: Tensor, *, rowwise: bool) -> State:
        """Initial state of a table; the first dimension is the table's rows.

        `rowwise` requests one second moment per row. Including the entry of `decay_state` makes decay lazy.
        """
        return {}

    @classmethod
    def pending_decay(cls, state: State, rows: Tensor | slice, idle_U: Tensor, config: Any) -> Tensor:
        """Decay factor for rows that were idle for `idle_U` steps at `optim.lr`."""
        raise NotImplementedError

    def table_update(self, table: SparseTable, *, rowwise: bool) -> "TableUpdate":
        return TableUpdate(table, self, self.row_state(table.weight.detach(), rowwise=rowwise))

    def step_dense(
        self, weights: Sequence[Tensor], gradients: Sequence[Tensor], states: Sequence[State], *, divisor: Tensor
    ) -> None:
        """Update dense parameters using their gradients divided by `divisor`."""
        for weight, grad, state in zip(weights, gradients, states, strict=True):
            weight.copy_(self.move(weight, state, grad / divisor))

    # ---- shared by all optimizers ----

    @classmethod
    @torch.no_grad()
    def finish_weights(cls, model: nn.Module, state: dict[str, Any], config: Any) -> None:
        """Apply decay that is still pending in a checkpoint's optimizer state to a loaded model."""
        for name, table in state["tables"].items():
            if "decayed" in table:
                weight = model.get_parameter(f"{name}.weight")
                idle_V = (state["rate_sum"] - table["decayed"]).float()
                for rows in row_blocks(len(weight)):
                    weight[rows] *= cls.pending_decay(table, rows, idle_V[rows], config).to(weight.device)

    @property
    def frozen(self) -> Tensor:
        """Whether updates are masked, as a tensor on the device."""
        return self.bad_step >= 0

    @torch.no_grad()
    def step(self, loss: Tensor, *, lr: float, num_steps: float) -> None:
        """Update all parameters from the mean loss's gradients over `num_steps` steps, then clear the gradients.

        With several ranks, the loss and all gradients except the input's are already averaged.
        """
        self.lr = lr
        self.step_count += 1
        self.rate_sum += lr / self.config.lr
        scale = num_steps if self.config.reduction == "stream" else 1
        for parameter in self.input_parameters:
            assert parameter.grad is not None
            self.ranks.mean(parameter.grad)
        tables = [table for table in self.tables.values() if table.collect()]
        dense = [(p, p.grad, s) for p, s in zip(self.dense, self.dense_states, strict=True) if p.grad is not None]
        gradients = [grad for _, grad, _ in dense]
        self.grad_norm = get_total_norm([*gradients, *(table.grad_UE for table in tables if table.clipped)]) * scale
        unclipped = sum(table.grad_UE.sum() for table in tables if not table.clipped)
        bad = ~torch.isfinite(self.grad_norm + loss + unclipped)
        self.bad_step = torch.where((self.bad_step < 0) & bad, self.step_count, self.bad_step)
        divisor = torch.ones_like(self.grad_norm)
        if self.config.max_grad_norm is not None:
            divisor = (self.grad_norm / self.config.max_grad_norm).clamp(min=1)
        divisor = divisor / scale
        self.step_dense([weight for weight, *_ in dense], gradients, [state for *_, state in dense], divisor=divisor)
        for parameter in self.dense:
            parameter.grad = None
        for table in tables:
            table.step(divisor=divisor, scale=scale)

    @torch.no_grad()
    def apply_pending_decay(self) -> None:
        """Apply the pending decay of idle rows, so the weights are up to date."""
        for table in self.tables.values():
            table.apply_pending_decay()

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain numbers only."""
        return {
            "step": self.step_count,
            "lr": self.lr,
            "rate_sum": self.rate_sum,
            "dense": dict(enumerate(self.dense_states)),
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


class TableUpdate:
    """Optimizer state of one table, and the rows used in the current step."""

    clipped = True
    """Whether the rows' gradient is clipped and included in the global norm."""

    def __init__(self, table: SparseTable, optimizer: Optimizer, state: State) -> None:
        self.table, self.optimizer, self.state = table, optimizer, state
        self.decays = "decayed" in state
        if self.decays:
            table.before_reading.append(self._apply)

    def collect(self) -> bool:
        """Fetch the step's rows and sum their gradients per row; False if the table was not used."""
        used = self.table.take_used()
        if used is None:
            return False
        assert used.values.grad is not None
        self.rows_U, self.uses = used.rows_U, used.uses
        self.grad_NE = used.values.grad.flatten(0, -2)
        self.grad_UE = self.grad_NE if used.uses is None else used.uses.sum(self.grad_NE)
        self.optimizer.ranks.mean(self.grad_UE)  # rows and their order are the same on all ranks
        return True

    def step(self, *, divisor: Tensor, scale: float) -> None:
        """Update the rows using `grad_UE` divided by `divisor`, or multiplied by `scale` if not clipped."""
        rows_U, weight = self.rows_U, self.table.weight
        state = {key: value[rows_U] for key, value in self.state.items() if key != "decayed"}
        weight[rows_U] = self.optimizer.move(weight[rows_U], state, self.grad_UE / divisor)
        for key, value in state.items():
            self.state[key][rows_U] = value
        if self.decays:
            fill_rows(self.state["decayed"], rows_U, self.optimizer.rate_sum)

    def apply_pending_decay(self) -> None:
        for rows in row_blocks(len(self.table.weight)) if self.decays else ():
            self._apply(rows)

    @torch.no_grad()
    def _apply(self, rows: Tensor | slice) -> None:
        optimizer = self.optimizer
        idle_U = (optimizer.rate_sum - self.state["decayed"][rows]) * ~optimizer.frozen
        self.table.weight[rows] *= optimizer.pending_decay(self.state, rows, idle_U.float(), optimizer.config)
        fill_rows(self.state["decayed"], rows, optimizer.rate_sum)


def decay_state(weight: Tensor, weight_decay: float) -> State:
    """Cumulative rate up to which each row's decay has been applied; empty without decay."""
    return {"decayed": torch.zeros(len(weight), dtype=torch.float64, device=weight.device)} if weight_decay else {}


def fused_state(weight: Tensor, **start: float) -> State:
    """Initial state for torch's fused kernels: a step count, and tensors like the weight filled with these values."""
    return {
        "step": torch.zeros((), device=weight.device),
        **{key: torch.full_like(weight, value) for key, value in start.items()},
    }


def fused_step(
    kernel: Callable[..., None],
    weights: Sequence[Tensor],
    *state: Sequence[Tensor],
    optimizer: Optimizer,
    divisor: Tensor,
    **settings: Any,
) -> None:
    """Call a fused torch kernel for all weights; it scales gradients and masks updates in the same pass."""
    # On meta or fake tensors a step is only traced; the kernels cannot run there and need no memory.
    if has_data(weights[0]):
        settings = {"lr": optimizer.lr, "fused": True, "foreach": False, "maximize": False} | settings
        kernel(weights, *state, grad_scale=divisor.float(), found_inf=optimizer.frozen.float(), **settings)


# ---- learning-rate schedules -----------------------------------------------------------------------------------------
#
# - `constant`.
# - `halve_after_half`: halved after each epoch in the second half of training.
# - `plateau`: multiplied by `optim.plateau_factor` after `optim.plateau_patience` evaluations without improvement.
# - `linear`, `cosine`: from `optim.lr` at the first step to zero at the limit that ends the run.
#
# During warm-up, the rate of step n is multiplied by n / `optim.warmup_steps`.


def learning_rate(
    config: OptimConfig, *, step: int, epoch: int, max_epochs: int | None, done: float, plateaus: int = 0
) -> float:
    """Return a step's learning rate; `step` and `epoch` start at 0, `done` is the fraction of training completed."""
    warm_up = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    match config.schedule:
        case "constant":
            share = 1.0
        case "halve_after_half":
            assert max_epochs is not None
            # With 10 epochs, the sixth is the first with a halved rate.
            share = 0.5 ** max(0, epoch + 1 - -(-max_epochs // 2))
        case "plateau":
            share = config.plateau_factor**plateaus
        case "linear":
            share = 1 - done
        case "cosine":
            share = (1 + math.cos(math.pi * done)) / 2
    return config.lr * warm_up * share
