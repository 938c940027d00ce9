"""The candidates of `what=layers`: our layers, their plain PyTorch forms, torch's adaptive softmax, bare products.

Shapes: N tokens, D width, V words.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import yaml  # type: ignore[import-untyped]
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lm.benchmark.arguments import draw_words
from lm.benchmark.measure import STEP, WARM_UP, Step, Work, interleaved_medians
from lm.cli import CONF
from lm.cli import compose_config as compose
from lm.compare.paper import LAYERS as PAPER_ORDER
from lm.config.groups import OutputConfig
from lm.config.schema import TrainConfig
from lm.optim.sparse_table import SparseTable
from lm.output.base import OutputLayer
from lm.output.build import build_output
from lm.output.clusters.choice import ClusterCosts, head_size
from lm.output.clusters.cost_model import measured_model
from lm.output.clusters.partition import projected_widths
from lm.output.clusters.settings import ClusteredConfig
from lm.output.joint import JointSoftmax
from lm.system.arithmetic import forward_pass, training_products
from lm.system.console import say
from lm.system.precision import Precision

PLAIN = "_plain"
"""Suffix of a layer's plain form: linear maps, cat and cross_entropy."""
TORCH_ADAPTIVE = "torch_adaptive"

CPU = torch.device("cpu")
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Workload:
    """Sizes and targets, the same for every candidate."""

    counts: NDArray[np.int64]
    cutoffs: list[int]
    width: int
    tokens: int
    classes: NDArray[np.int64] | None = None
    """Brown classes for `hsm_sim`; without them its classes have equal sizes."""
    device: torch.device = CPU
    precision: Precision = Precision.fp32

    def targets(self) -> Tensor:
        """Words drawn in proportion to their counts."""
        return torch.from_numpy(draw_words(self.counts, self.tokens))


@cache
def layer_names() -> tuple[str, ...]:
    """Every `conf/output/NAME.yaml` that defines a layer of its own, the paper's layers first."""
    files = (Path(CONF) / "output").glob("*.yaml")
    names = sorted(file.stem for file in files if yaml.safe_load(file.read_text()).get("name") == file.stem)
    return tuple(sorted(names, key=lambda name: PAPER_ORDER.index(name) if name in PAPER_ORDER else len(names)))


@cache
def shipped_settings(name: str) -> OutputConfig:
    return compose([f"output={name}"], name="train", schema=TrainConfig).output


def layer_settings(name: str, workload: Workload, **changes: Any) -> OutputConfig:
    """Those of `conf/output`, apart from the cutoffs."""
    config = shipped_settings(name)
    if hasattr(config, "cutoffs"):
        changes |= {"cutoffs": workload.cutoffs}
    if name == "hsm_sim" and workload.classes is not None:
        changes |= {"num_classes": int(workload.classes.max()) + 1}
    return replace(config, **changes)


def make_layer(name: str, workload: Workload, **changes: Any) -> OutputLayer:
    config = layer_settings(name, workload, **changes)
    return build_output(config, width=workload.width, counts=workload.counts, classes=workload.classes)


@cache
def has_plain_form(name: str) -> bool:
    """Whether the layer is one softmax over all words, which plain PyTorch can write in three lines."""
    layer = make_layer(name, Workload(np.arange(64, 0, -1), [16], width=64, tokens=1))
    return type(layer).loss is JointSoftmax.loss


def prepare(name: str, workload: Workload) -> Work:
    """A forward and backward pass of the candidate, and a warm-up on a few tokens.

    The gradients that the warm-up leaves are replaced by the step's, so they are not part of its extra memory.
    """
    torch.manual_seed(0)
    hidden_ND = torch.randn(workload.tokens, workload.width, device=workload.device, requires_grad=True)
    targets_N = workload.targets().to(workload.device)
    module, loss = _module_and_loss(name, workload)
    step = partial(_step, loss, module, hidden_ND, workload.precision)
    return {WARM_UP: partial(step, targets_N[:8]), STEP: partial(step, targets_N)}


def _module_and_loss(name: str, workload: Workload) -> tuple[nn.Module, Loss]:
    if name == TORCH_ADAPTIVE:
        module = nn.AdaptiveLogSoftmaxWithLoss(workload.width, len(workload.counts), workload.cutoffs)
        module.to(workload.device)
        return module, lambda hidden_ND, targets_N: module(hidden_ND, targets_N).loss
    layer = make_layer(name.removesuffix(PLAIN), workload).to(workload.device)
    if name.endswith(PLAIN):
        assert isinstance(layer, JointSoftmax)
        return layer, partial(_plain_loss, layer)
    # In training the prefetch thread makes the plan, so its time is not the step's.
    plans = {workload.tokens: layer.plan(workload.targets()).to(workload.device)}
    return layer, lambda hidden_ND, targets_N: layer.loss(hidden_ND, targets_N, plans.get(len(targets_N)))


def _plain_loss(layer: JointSoftmax, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
    parts = [F.linear(x, weight) for x, weight in zip(layer.views(hidden_ND), layer.weights(), strict=True)]
    return F.cross_entropy(torch.cat(parts, dim=1) if len(parts) > 1 else parts[0], targets_N)


def _step(loss: Loss, module: nn.Module, hidden_ND: Tensor, precision: Precision, targets_N: Tensor) -> None:
    module.zero_grad(set_to_none=True)
    hidden_ND.grad = None
    with training_products(precision):
        with forward_pass(precision, hidden_ND.device):
            value = loss(hidden_ND[: len(targets_N)], targets_N)
        value.backward()  # type: ignore[no-untyped-call]
    for table in module.modules():
        if isinstance(table, SparseTable):
            table.take_used()


@dataclass(frozen=True)
class Bench(ClusterCosts):
    """The adaptive softmax with different cutoffs: its measured times beside those that a cost model predicts."""

    repeats: int = 1
    device: torch.device = CPU
    precision: Precision = Precision.fp32

    @classmethod
    def measured(cls, sizes: Workload, *, repeats: int, cache_dir: Path) -> Self:
        """With the cost model of this machine, which is measured now or was kept."""
        adaptive, machine = shipped_settings("adaptive"), (sizes.device, sizes.precision)
        assert isinstance(adaptive, ClusteredConfig)
        widths = [sizes.width, *projected_widths(sizes.width, num_tails=3)]
        model = measured_model(widths, sizes.tokens, *machine, cache_dir=cache_dir, notice=say)
        return cls(sizes.counts, sizes.width, sizes.tokens, model, adaptive.head_coverage, repeats, *machine)

    def measure(self, choices: Mapping[str, Sequence[int]]) -> dict[str, float]:
        """Seconds per training step of the adaptive softmax with each of these cutoffs."""
        return interleaved_medians(
            {name: prepare("adaptive", self.workload(cutoffs))[STEP] for name, cutoffs in choices.items()},
            repeats=self.repeats,
        )

    def workload(self, cutoffs: Sequence[int]) -> Workload:
        machine: dict[str, Any] = {"device": self.device, "precision": self.precision}
        return Workload(self.counts, list(cutoffs), self.width, self.tokens, **machine)

    def head_size(self, coverage: float) -> int:
        """The most frequent words that cover this share of the tokens."""
        return head_size(self.counts / self.counts.sum(), coverage=coverage)


# ---- bare matrix products ------------------------------------------------------------------------------------------


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the matrix products that are computed inside; on the meta device that costs nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.factors: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), options: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten.mm.default and arguments[0].numel() and arguments[1].numel():
            self.factors.append((arguments[0], arguments[1]))
        return function(*arguments, **(options or {}))

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return sum(2 * len(a) * a.size(1) * b.size(1) for a, b in self.factors)

    def replay(self) -> Step:
        """The same products in the same memory layouts, into buffers that are allocated once."""

        @cache
        def buffer(role: str, size: int) -> Tensor:  # noqa: ARG001 - one buffer for each role
            return torch.randn(size)

        def like(factor: Tensor, role: str) -> Tensor:
            extent = 1 + sum((n - 1) * step for n, step in zip(factor.shape, factor.stride(), strict=True))
            return buffer(role, extent).as_strided(factor.shape, factor.stride())

        calls = [
            (like(a, "left"), like(b, "right"), buffer("product", len(a) * b.size(1)).view(len(a), b.size(1)))
            for a, b in self.factors
        ]

        def step() -> None:
            for a, b, product in calls:
                torch.mm(a, b, out=product)

        return step


def bare_products(name: str, workload: Workload) -> Products:
    """The forward and backward products of every linear map of the layer."""
    layer = make_layer(name, workload, fused=False)
    plan = layer.plan(workload.targets())
    hidden_ND = torch.empty(workload.tokens, workload.width, device="meta", requires_grad=True)
    products = Products()
    with products:
        loss = layer.to("meta").loss(hidden_ND, workload.targets().to("meta"), plan.to(torch.device("meta")))
        loss.backward()  # type: ignore[no-untyped-call]
    return products
