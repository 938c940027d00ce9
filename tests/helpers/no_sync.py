"""Fails on operations that would synchronize with a GPU."""

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


class NoHostSync(TorchDispatchMode):
    """Inside the context, no operation may read a value from the device or copy to another device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        assert name not in FORBIDDEN, f"{name} synchronizes with the device"
        if name in ("_to_copy", "copy_"):  # casts may name the device they stay on
            assert (kwargs or {}).get("device") in (None, args[0].device), "copy to another device"
        if name == "copy_":
            assert args[0].device == args[1].device, "copy to another device"
        if name in ("index_put", "index_put_"):
            assert args[2].dim() > 0, "assigning a number at indices synchronizes: use index_fill_"
        for index in args[1] if name in ("index", "index_put", "index_put_") else ():
            assert index is None or index.dtype != torch.bool, "indexing with a mask synchronizes"
        return func(*args, **(kwargs or {}))
