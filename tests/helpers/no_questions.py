"""A stand-in for a GPU: fails on whatever would make the host wait for a device."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

FORBIDDEN = {
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "equal",
    "unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "repeat_interleave",
}


class NoQuestions(TorchDispatchMode):
    """While entered, no operation may need a number from the device or copy to another one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        assert name not in FORBIDDEN, f"{name} asks the device for a number"
        if name in ("_to_copy", "copy_"):  # casts may name the device they stay on
            assert (kwargs or {}).get("device") in (None, args[0].device), "copy to another device"
        if name == "copy_":
            assert args[0].device == args[1].device, "copy to another device"
        if name in ("index_put", "index_put_"):
            assert args[2].dim() > 0, "a number put at indices is copied to the device, which waits: use index_fill_"
        for index in args[1] if name in ("index", "index_put", "index_put_") else ():
            assert index is None or index.dtype != torch.bool, "a mask as an index asks for a count"
        return func(*args, **(kwargs or {}))
