"""Train word-level language models over very large vocabularies.

Trained models: `lm.load("runs/NAME").next_word("the object has a", k=5)`; see `lm.inference.api`. The output layers are
ordinary PyTorch modules: `lm.AdaptiveSoftmax(512, 50_000, [2000, 10_000])`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lm.inference.api import load as load
    from lm.model.inputs.adaptive import AdaptiveInput as AdaptiveInput
    from lm.output.layers.adaptive import AdaptiveSoftmax as AdaptiveSoftmax
    from lm.output.layers.dsoftmax import DSoftmax as DSoftmax
    from lm.output.layers.dsoftmax import DSoftmaxStar as DSoftmaxStar
    from lm.output.layers.full import FullSoftmax as FullSoftmax
    from lm.output.layers.full import SelfNormalizedSoftmax as SelfNormalizedSoftmax
    from lm.output.layers.hsm import FrequencySoftmax as FrequencySoftmax
    from lm.output.layers.hsm import SimilaritySoftmax as SimilaritySoftmax
    from lm.output.layers.hsm_huffman import HuffmanSoftmax as HuffmanSoftmax
    from lm.output.layers.sampling import NCE as NCE
    from lm.output.layers.sampling import BlackOut as BlackOut
    from lm.output.layers.sampling import SampledSoftmax as SampledSoftmax

__version__ = "0.2.0"

_MODULES = {
    "inference.api": ["load"],
    "model.inputs.adaptive": ["AdaptiveInput"],
    "output.layers.adaptive": ["AdaptiveSoftmax"],
    "output.layers.dsoftmax": ["DSoftmax", "DSoftmaxStar"],
    "output.layers.full": ["FullSoftmax", "SelfNormalizedSoftmax"],
    "output.layers.hsm": ["FrequencySoftmax", "SimilaritySoftmax"],
    "output.layers.hsm_huffman": ["HuffmanSoftmax"],
    "output.layers.sampling": ["NCE", "BlackOut", "SampledSoftmax"],
}
"""Modules of the public names, imported at first use: --help needs no torch, and no layer needs hydra."""


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"lm.{module}"), name)
    raise AttributeError(f"module 'lm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*(name for names in _MODULES.values() for name in names), "__version__"])
