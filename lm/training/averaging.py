"""Averages of the weights, used by evaluations and by commands that load a checkpoint.

- `trainer.average=0.999`, an EMA: the decay after step t is min(0.999, (1 + t) / (10 + t)), so that the random start is
  soon forgotten.
- `trainer.average=asgd`, the mean of all weights since a trigger (NT-ASGD: Merity, Keskar and Socher, 2018): the first
  evaluation that is worse than the best of those more than `NON_MONOTONIC` before it. After t steps the decay is
  t / (t + 1).

The rows of an embedding table are averaged lazily: an idle row's average catches up when the row is next read, as if it
had always had its current value. (Only weight decay changes idle rows, and only slightly.) So a step touches only
the rows it uses.

Shapes: U rows used by a step, V rows in the table, E width.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lm.optim.sparse_table import SparseTable, fill_rows, row_blocks

NON_MONOTONIC = 5
"""Latest evaluations that the trigger of NT-ASGD ignores."""


class WeightAverage:
    """Average of a model's weights. Create it after the optimizer, whose hooks must apply pending decay first."""

    def __init__(self, model: nn.Module, *, keep: float | None) -> None:
        """`keep` is the decay of an EMA; None for NT-ASGD."""
        self.model, self.keep = model, keep
        self.started = keep is not None
        """Whether the average is used; with NT-ASGD, only after its trigger."""
        self.evaluations = [math.inf] * (1 + NON_MONOTONIC)
        """The best validation perplexity before the latest ones, then the latest ones."""
        self.num_steps = 0
        self.kept = 0.0
        """Sum of the logs of all decays."""
        self.weights = dict(model.named_parameters())
        self.averages = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.tables: dict[str, Tensor] = {}
        """Per sparse table: (V,) the value of `kept` when each row's average was last updated."""
        self._used: dict[str, Tensor] = {}
        for module_name, table in model.named_modules():
            if isinstance(table, SparseTable) and table.sparse:
                name = f"{module_name}.weight"
                self.tables[name] = torch.zeros(len(table.weight), dtype=torch.float64, device=table.weight.device)
                table.before_reading.append(partial(self._before_reading, name))
        self.dense = [name for name in self.weights if name not in self.tables]

    @torch.no_grad()
    def step(self) -> None:
        """Update the averages after an optimizer step."""
        if not self.started:
            return
        self.num_steps += 1
        steps = self.num_steps
        keep = steps / (steps + 1) if self.keep is None else min(self.keep, (1 + steps) / (10 + steps))
        self.kept += math.log(keep)
        averages, weights = ([part[name] for name in self.dense] for part in (self.averages, self.weights))
        torch._foreach_lerp_(averages, [weight.detach() for weight in weights], 1 - keep)
        for name, rows_U in self._used.items():
            average_UE = self.averages[name][rows_U].lerp_(self.weights[name].detach()[rows_U], 1 - keep)
            self.averages[name][rows_U] = average_UE
            fill_rows(self.tables[name], rows_U, self.kept)
        self._used = {}

    @torch.no_grad()
    def record_evaluation(self, perplexity: float) -> None:
        """Start NT-ASGD from the current weights if its trigger fires; apply pending decay first."""
        if self.started:
            return
        best, oldest, *latest = self.evaluations
        self.started = perplexity > best
        self.evaluations = [min(best, oldest), *latest, perplexity]
        if self.started:
            for name, weight in self.weights.items():
                self.averages[name].copy_(weight)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap in the averages, if any, inside the context; apply pending decay first."""
        if not self.started:
            yield
            return
        for name, table in self.tables.items():
            for rows in row_blocks(len(table)):
                self._catch_up(name, rows)
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain numbers only."""
        return {
            "started": self.started,
            "evaluations": self.evaluations,
            "num_steps": self.num_steps,
            "kept": self.kept,
            "weights": self.averages,
            "tables": self.tables,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.started, self.evaluations = state["started"], list(state["evaluations"])
        self.num_steps, self.kept = state["num_steps"], state["kept"]
        for own, saved in ((self.averages, state["weights"]), (self.tables, state["tables"])):
            for name, tensor in own.items():
                tensor.copy_(saved[name])

    def _before_reading(self, name: str, rows_U: Tensor) -> None:
        """Hook called before a step reads and updates rows of a table."""
        if self.started:
            self._catch_up(name, rows_U)
            self._used[name] = rows_U

    @torch.no_grad()
    def _catch_up(self, name: str, rows: Tensor | slice) -> None:
        table, weight_UE = self.tables[name], self.weights[name].detach()[rows]
        self.averages[name][rows] = catch_up_ema(weight_UE, self.averages[name][rows], self.kept - table[rows])
        fill_rows(table, rows, self.kept)

    def _swap(self) -> None:
        for name, weight in self.weights.items():
            weight.data, self.averages[name] = self.averages[name], weight.data
        for module in self.model.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()  # one buffer, as cuDNN wants


def catch_up_ema(weight_UE: Tensor, average_UE: Tensor, kept_U: Tensor) -> Tensor:
    """Compute averages of rows that were idle while the average decayed by exp(`kept_U`)."""
    return torch.lerp(weight_UE, average_UE, kept_U.exp().to(weight_UE.dtype)[:, None])


@torch.no_grad()
def use_average(model: nn.Module, state: dict[str, Any] | None) -> None:
    """Replace a model's weights with the averages in its checkpoint; `state` is None for a run without averages."""
    if state is None or not state["started"]:
        return
    for name, weight in model.named_parameters():
        average = state["weights"][name]
        if name not in state["tables"]:
            weight.copy_(average)
            continue
        kept_V = state["kept"] - state["tables"][name]
        for rows in row_blocks(len(weight)):
            weight[rows] = catch_up_ema(weight[rows], average[rows].to(weight.device), kept_V[rows].to(weight.device))
