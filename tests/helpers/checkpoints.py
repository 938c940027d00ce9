"""A minimal neural checkpoint."""

import torch

from lm.system import checkpoint


def content(value: int = 1) -> dict[str, object]:
    """Make a checkpoint's content with `value` in its config and weights."""
    filler: dict[str, object] = dict.fromkeys(checkpoint.KEYS["neural"])
    return {**filler, "config": {"seed": value}, "model": {"weight": torch.full((50, 40), float(value))}}
