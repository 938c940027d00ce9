"""Which device a command runs on."""

import platform

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
        raise UserError(f"{key}={device} is not available: {what_is_missing()}, or {key}=auto")
    return device


def device_name(device: torch.device) -> str:
    """A device with its model, or the number of threads of a CPU."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    threads = torch.get_num_threads()
    return f"{device} ({threads} thread{'s' if threads > 1 else ''}, {platform.machine()})"


def what_is_missing() -> str:
    """Why a GPU is not available, and what to try."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} CUDA devices are visible. Try another number"
    if torch.version.cuda is None:
        return "no CUDA device is visible to this torch, which is built without CUDA. Try a CUDA build of it"
    return (
        f"no CUDA device is visible. torch is built for CUDA {torch.version.cuda}; the driver may be too old for it or "
        "the container was started without its GPUs. Try nvidia-smi, docker run --gpus all"
    )
