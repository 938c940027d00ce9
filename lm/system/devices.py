"""Which device a command runs on."""

import torch

from lm.system.errors import UserError
from lm.system.ranks import Ranks


def pick_device(name: str, *, key: str, ranks: Ranks | None = None) -> torch.device:
    """The device that a setting names; `auto` prefers the GPU. Each rank gets its own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if ranks is not None and ranks.size > 1 and device.type == "cuda":
        if ":" in name:
            raise UserError(f"{key} must not name one GPU for several ranks; got {name}. Try {key}=auto")
        device = torch.device("cuda", ranks.local_rank)
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        found = f"{torch.cuda.device_count()} CUDA devices are" if torch.cuda.is_available() else "no CUDA device is"
        raise UserError(f"{key}={device} is not available: {found} visible. Try {key}=auto")
    return device
