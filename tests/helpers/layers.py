"""Small layers of every kind for the tests, and what a training step of one leaves behind."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lm.config.groups import OutputConfig
from lm.output.base import OutputLayer, build_output
from lm.output.clusters.settings import Objective
from lm.output.layers.adaptive import AdaptiveConfig
from lm.output.layers.dsoftmax import DSoftmaxConfig, DSoftmaxStarConfig
from lm.output.layers.full import FullConfig, SelfNormalizedConfig
from lm.output.layers.hsm import HierarchicalConfig
from lm.output.layers.hsm_huffman import HuffmanConfig
from lm.output.layers.sampling import BlackOutConfig, NCEConfig, SamplingConfig

NAMES = [
    "full",
    "sampled",
    "hsm_freq",
    "hsm_sim",
    "dsoftmax",
    "dsoftmax_star",
    "adaptive",
    "adaptive_leaf",
    "adaptive_bias",
    "nce",
    "nce_learned",
    "blackout",
    "self_normalized",
    "hsm_huffman",
]


CHOOSING: dict[str, Any] = {
    "num_tails": "auto",
    "objective": Objective.as_built,
    "head_coverage": 0.75,
    "cost_model": "flops",
}
"""How cutoffs would be chosen, were they not given."""


def config_of(name: str, *, cutoffs: list[int], fused: bool = True, samples: float = 0.5) -> OutputConfig:
    match name:
        case "full":
            return FullConfig(name, fused)
        case "sampled":
            return SamplingConfig(name, fused, samples)
        case "nce" | "nce_learned":
            return NCEConfig("nce", fused, samples, log_z="learned" if name == "nce_learned" else 0.3)
        case "blackout":
            return BlackOutConfig(name, fused, samples)
        case "self_normalized":
            return SelfNormalizedConfig(name, fused)
        case "hsm_huffman":
            return HuffmanConfig(name, fused)
        case "hsm_freq" | "hsm_sim":
            return HierarchicalConfig(name, fused, None)
        case "dsoftmax":
            return DSoftmaxConfig(name, fused, cutoffs, **CHOOSING)
        case "dsoftmax_star":
            return DSoftmaxStarConfig(name, fused, cutoffs, **CHOOSING)
        case _:
            leaf, bias = name == "adaptive_leaf", name == "adaptive_bias"
            return AdaptiveConfig("adaptive", fused, cutoffs, **CHOOSING, shortlist=not leaf, head_bias=bias)


def zipf_counts(vocab_size: int) -> np.ndarray:
    return np.maximum(1, 1000 // np.arange(1, vocab_size + 1))


def make_layer(
    name: str,
    *,
    width: int = 16,
    vocab_size: int = 40,
    cutoffs: tuple[int, ...] = (10, 25),
    fused: bool = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    samples: float = 0.5,
) -> OutputLayer:
    torch.manual_seed(seed)
    config = config_of(name, cutoffs=list(cutoffs), fused=fused, samples=samples)
    num_classes = round(vocab_size**0.5)
    classes = np.random.default_rng(seed).permutation(np.arange(vocab_size) % num_classes)
    layer = build_output(config, width=width, counts=zipf_counts(vocab_size), classes=classes)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return layer.to(dtype)


def gradients(layer: OutputLayer) -> dict[str, Tensor]:
    """Gradient of every parameter after a backward pass; a row table's is spread over its rows."""
    found = {name: p.grad for name, p in layer.named_parameters() if p.requires_grad}
    if hasattr(layer, "table"):
        used = layer.table.take_used()
        assert used is not None
        found["table.weight"] = torch.zeros_like(layer.table.weight).index_copy(0, used.rows_U, used.values.grad)
    assert all(g is not None for g in found.values()), [n for n, g in found.items() if g is None]
    return found
