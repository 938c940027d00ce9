"""Randomness is a function of (seed, purpose, step), never of history: a resumed run draws what it would have drawn."""

from hashlib import blake2b

import torch


def seed_for(seed: int, purpose: str, step: int = 0) -> int:
    """A 63-bit seed, independent for every purpose and step."""
    return int.from_bytes(blake2b(f"{seed}/{purpose}/{step}".encode(), digest_size=8).digest()) >> 1


def generator_for(seed: int, purpose: str, step: int = 0, *, device: torch.device | None = None) -> torch.Generator:
    """A fresh generator on the device that will draw; the meta device, which draws nothing, borrows the host's."""
    on_device = device if device is not None and device.type != "meta" else torch.device("cpu")
    return torch.Generator(on_device).manual_seed(seed_for(seed, purpose, step))
