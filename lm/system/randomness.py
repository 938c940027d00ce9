"""Randomness depends only on (seed, purpose, step), so a resumed run draws what it would have drawn."""

from hashlib import blake2b

import torch


def seed_for(seed: int, purpose: str, step: int = 0) -> int:
    """Derive a 63-bit seed, independent for every purpose and step."""
    return int.from_bytes(blake2b(f"{seed}/{purpose}/{step}".encode(), digest_size=8).digest()) >> 1


def generator_for(seed: int, purpose: str, step: int = 0, *, device: torch.device | None = None) -> torch.Generator:
    """Create a generator on the device, by default the host."""
    return torch.Generator(device or "cpu").manual_seed(seed_for(seed, purpose, step))
