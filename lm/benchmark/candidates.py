"""What `what=layers` compares: our layers, what one would write with torch alone, and the bare matrix products.

Shapes: N tokens, D width, K words of a product.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from lm.benchmark.counts import draw_words
from lm.benchmark.measure import Step
from lm.config.groups import OutputConfig
from lm.config.registry import find_plugin
from lm.data.plan import Plan
from lm.output.base import OutputLayer
from lm.output.build import build_output
from lm.output.class_hierarchy import HierarchicalSoftmax
from lm.output.clusters.settings import ClusteredConfig, Objective
from lm.output.layers.adaptive import AdaptiveSoftmax
from lm.output.layers.dsoftmax import DSoftmax
from lm.output.layers.dsoftmax_star import DSoftmaxStar
from lm.output.layers.full import FullSoftmax
from lm.output.layers.sampled import SampledSoftmax

LAYERS = ["full", "sampled", "hsm_freq", "hsm_sim", "dsoftmax", "dsoftmax_star", "adaptive"]
PLAIN = {"full": "full_plain", "dsoftmax": "dsoftmax_plain", "dsoftmax_star": "dsoftmax_star_plain"}
"""Layers whose obvious form, linear maps, cat and cross_entropy, is timed beside them."""
TORCH_ADAPTIVE = "torch_adaptive"

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Workload:
    """Sizes and targets that every candidate gets."""

    counts: NDArray[np.int64]
    cutoffs: list[int]
    width: int
    tokens: int
    classes: NDArray[np.int64] | None = None
    """Brown classes for `hsm_sim`; without a text they are classes of equal size."""

    def targets(self) -> Tensor:
        """Words drawn by their counts."""
        return torch.from_numpy(draw_words(self.counts, self.tokens))


def prepare(name: str, workload: Workload) -> tuple[Step, Step]:
    """(a warm-up on a few tokens, one forward and backward pass) of the candidate of that name.

    The warm-up leaves gradients behind, which the step replaces: what it needs beyond them is its extra memory.
    """
    torch.manual_seed(0)
    hidden_ND = torch.randn(workload.tokens, workload.width, requires_grad=True)
    targets_N = workload.targets()
    module, loss = _ours(name, workload, targets_N) if name in LAYERS else _plain(name, workload)
    return partial(_step, loss, module, hidden_ND, targets_N[:8]), partial(_step, loss, module, hidden_ND, targets_N)


def _ours(name: str, workload: Workload, targets_N: Tensor) -> tuple[nn.Module, Loss]:
    layer = make_layer(name, workload)
    # The plan is made by the prefetch thread in training, so its time is not the step's.
    plans = {len(targets_N): layer.plan(targets_N)}
    return layer, lambda hidden_ND, targets_N: layer.loss(hidden_ND, targets_N, plans.get(len(targets_N)))


def _step(loss: Loss, module: nn.Module, hidden_ND: Tensor, targets_N: Tensor) -> None:
    module.zero_grad(set_to_none=True)
    hidden_ND.grad = None
    loss(hidden_ND[: len(targets_N)], targets_N).backward()  # type: ignore[no-untyped-call]
    if isinstance(module, SampledSoftmax):
        module.table.take_used()


def make_layer(name: str, workload: Workload) -> OutputLayer:
    """The layer with the settings that `conf/output` ships, apart from the cutoffs."""
    schema = find_plugin("output", name).settings
    values: dict[str, object] = {"name": name, "fused": True}
    if issubclass(schema, ClusteredConfig):
        automatic = {"num_tails": "auto", "objective": Objective.as_built, "head_coverage": 0.75, "cost_model": None}
        values |= {"cutoffs": workload.cutoffs, **automatic}
    num_classes = int(workload.classes.max()) + 1 if workload.classes is not None and name == "hsm_sim" else None
    optional = {"sample_fraction": 0.2, "num_classes": num_classes, "shortlist": True, "head_bias": False}
    values |= {key: value for key, value in optional.items() if key in schema.__dataclass_fields__}  # type: ignore[attr-defined]
    config: OutputConfig = schema(**values)
    return build_output(config, width=workload.width, counts=workload.counts, classes=workload.classes)


# ---- what one would write with torch alone -------------------------------------------------------------------------


def _plain(name: str, workload: Workload) -> tuple[nn.Module, Loss]:
    if name == TORCH_ADAPTIVE:
        module = nn.AdaptiveLogSoftmaxWithLoss(workload.width, len(workload.counts), workload.cutoffs)
        return module, lambda hidden_ND, targets_N: module(hidden_ND, targets_N).loss
    layer = make_layer(next(ours for ours, plain in PLAIN.items() if plain == name), workload)
    if isinstance(layer, FullSoftmax):
        return layer, lambda hidden_ND, targets_N: F.cross_entropy(F.linear(hidden_ND, layer.weight), targets_N)
    assert isinstance(layer, DSoftmax | DSoftmaxStar)

    def loss(hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        views = layer.views(hidden_ND)
        logits_NV = torch.cat([F.linear(x, w) for x, w in zip(views, layer.clusters, strict=True)], dim=1)
        return F.cross_entropy(logits_NV, targets_N)

    return layer, loss


# ---- nothing but the matrix products -------------------------------------------------------------------------------


def bare_products(name: str, workload: Workload) -> Step:
    """The forward and the two backward products of every linear map of the layer."""
    layer = make_layer(name, workload)
    return products_of(product_shapes(layer, layer.plan(workload.targets())))


def products_of(shapes: Sequence[tuple[int, int, int]]) -> Step:
    """Forward and backward products of linear maps of these (tokens, outputs, width), into buffers made beforehand."""
    shapes = [shape for shape in shapes if shape[0]]
    buffers: dict[tuple[int, int, int], Sequence[Tensor]] = {}
    for n, k, d in shapes:
        input_ND, weight_KD, logits_NK = torch.randn(n, d), torch.randn(k, d), torch.empty(n, k)
        buffers[n, k, d] = input_ND, weight_KD, logits_NK, torch.empty_like(input_ND), torch.empty_like(weight_KD)

    def step() -> None:
        for shape in shapes:
            input_ND, weight_KD, logits_NK, grad_input_ND, grad_weight_KD = buffers[shape]
            torch.mm(input_ND, weight_KD.t(), out=logits_NK)
            torch.mm(logits_NK.t(), input_ND, out=grad_weight_KD)
            torch.mm(logits_NK, weight_KD, out=grad_input_ND)

    return step


def product_shapes(layer: OutputLayer, plan: Plan) -> list[tuple[int, int, int]]:
    """(tokens, words or outputs, width) of each linear map of a training step."""
    match layer:
        case FullSoftmax():
            return [(plan.counts[0], layer.vocab_size, layer.width)]
        case SampledSoftmax():
            return [(plan.counts[0], len(plan.tensors["words"]), layer.width)]
        case DSoftmax() | DSoftmaxStar():
            n = plan.counts[0]
            projections = [(n, d, layer.width) for d in layer.widths[1:]] if isinstance(layer, DSoftmaxStar) else []
            return [*projections, *((n, k, d) for k, d in zip(layer.sizes, layer.widths, strict=True))]
        case AdaptiveSoftmax():
            tails = list(zip(plan.counts[1:], layer.cluster_sizes, layer.leaf_widths, strict=True))
            return [
                (plan.counts[0], len(layer.head), layer.width),
                *((n, d, layer.width) for n, _, d in tails if d != layer.width),
                *tails,
            ]
        case HierarchicalSoftmax():
            classes = zip(plan.counts[1:], layer.cluster_sizes, strict=True)
            root = (plan.counts[0], len(layer.cluster_sizes), layer.width)
            return [root, *((n, k, layer.width) for n, k in classes if k > 1)]
    raise AssertionError(type(layer))
