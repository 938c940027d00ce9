"""Small output layers of every kind, and their gradients after a training step."""

from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from lm.config.groups import OutputConfig, find_plugin, plugin_names
from lm.output.base import OutputLayer, build_output

VARIANTS = {
    "adaptive_leaf": ("adaptive", {"shortlist": False}),
    "adaptive_bias": ("adaptive", {"head_bias": True}),
    "nce": ("nce", {"log_z": 0.3}),
    "nce_learned": ("nce", {"log_z": "learned"}),
}
NAMES = list(dict.fromkeys([*plugin_names("output"), *VARIANTS]))


def config_of(name: str, *, cutoffs: list[int], samples: float = 0.5) -> OutputConfig:
    option, changes = VARIANTS.get(name, (name, {}))
    settings = find_plugin("output", option).settings
    values = {"cutoffs": cutoffs, "sample_fraction": samples, **changes}
    known = {field.name for field in fields(settings)}
    config: OutputConfig = settings(name=option, **{key: value for key, value in values.items() if key in known})
    return config


def zipf_counts(vocab_size: int) -> np.ndarray:
    return np.maximum(1, 1000 // np.arange(1, vocab_size + 1))


def make_layer(
    name: str,
    *,
    width: int = 16,
    vocab_size: int = 40,
    cutoffs: tuple[int, ...] = (10, 25),
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    samples: float = 0.5,
) -> OutputLayer:
    torch.manual_seed(seed)
    config = config_of(name, cutoffs=list(cutoffs), samples=samples)
    num_classes = round(vocab_size**0.5)
    classes = np.random.default_rng(seed).permutation(np.arange(vocab_size) % num_classes)
    layer = build_output(config, width=width, counts=zipf_counts(vocab_size), classes=classes)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return layer.to(dtype)


def gradients(layer: OutputLayer) -> dict[str, Tensor]:
    """Return every parameter's gradient after a backward pass, with sparse gradients made dense."""
    found = {name: p.grad for name, p in layer.named_parameters() if p.requires_grad}
    if hasattr(layer, "table"):
        used = layer.table.take_used()
        assert used is not None
        found["table.weight"] = torch.zeros_like(layer.table.weight).index_copy(0, used.rows_U, used.values.grad)
    assert all(g is not None for g in found.values()), [n for n, g in found.items() if g is None]
    return found
