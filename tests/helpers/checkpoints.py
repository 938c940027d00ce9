"""A minimal neural checkpoint."""

import torch

from lm.system import checkpoint


def content(value: int = 1) -> dict[str, object]:
    """Return a checkpoint's content whose config and weights hold `value`."""
    filler: dict[str, object] = dict.fromkeys(checkpoint.KEYS["neural"])
    return {**filler, "config": {"seed": value}, "model": {"weight": torch.full((50, 40), float(value))}}
