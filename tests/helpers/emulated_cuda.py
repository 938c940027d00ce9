"""An emulated CUDA device, for tests on a machine without one: host memory, CPU kernels, CUDA's rules.

Tensors on it are of a subclass that reports device "cuda". Computing with tensors of two devices fails, float tensors
without values are filled with NaN, reads that would wait for the device are recorded or forbidden
(`torch.cuda.set_sync_debug_mode`), and recurrent layers obey cuDNN. Kernels, streams, pinned memory and NCCL are not
emulated, and random numbers are the CPU's.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lm.output.logits import has_wide_sums
from lm.system.tree import leaves, map_leaves

READS = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "repeat_interleave"}
"""Operations that wait for the device, besides copies to the host; also those of the family `unique`."""
INDEXING = ("index", "index_put", "index_put_")
FLOAT32 = {"layer_norm", "softmax", "log_softmax", "exp", "log", "pow", "sum", "cumsum", "norm", "cross_entropy_loss"}
"""Operations that autocast computes in float32 on CUDA only."""
KERNELS = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
FACTORIES = ("empty", "zeros", "ones", "full", "arange", "tensor", "rand", "randn", "randint")
NAME = "Emulated GPU"


class Gpu:
    """What happened on the emulated device."""

    def __init__(self, *, capability: tuple[int, int], cudnn: int, fused_sums: bool) -> None:
        self.capability, self.cudnn, self.fused_sums = capability, cudnn, fused_sums
        """`fused_sums`: whether matmuls of bfloat16 can return float32 sums."""
        self.current = 0
        self.waits: list[str] = []
        self.atomics: set[str] = set()
        """Sums whose order CUDA does not fix."""
        self.misaligned: set[tuple[int, ...]] = set()
        """Shapes of bfloat16 factors that tensor cores cannot read directly."""
        self.recurrent_dtypes: set[torch.dtype] = set()
        self.forbid_waits = False

    def wait(self, name: str) -> None:
        self.waits.append(name)
        if self.forbid_waits:
            raise RuntimeError(f"{name} synchronizes with the device")


GPUS: list[Gpu] = []
"""The emulated GPU in use, if any."""


class CudaTensor(Tensor):
    """A tensor in host memory that claims to be on a GPU."""

    index = 0

    device = property(lambda self: torch.device("cuda", self.index))  # type: ignore[assignment]
    is_cuda = property(lambda _: True)  # type: ignore[assignment]
    is_cpu = property(lambda _: False)  # type: ignore[assignment]

    def get_device(self) -> int:
        return self.index

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        return self.to("cpu")

    def tolist(self) -> Any:
        return self.to("cpu").tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda device type tensor to numpy")

    __array__ = numpy  # type: ignore[assignment]

    def backward(self, gradient: Tensor | None = None, **options: Any) -> None:  # type: ignore[override]
        torch.autograd.backward([self], [gradient], **options)  # type: ignore[list-item]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, gpu = func.__name__, GPUS[-1]
        if name in KERNELS:
            check_cudnn(args, gpu)
        elif name in FLOAT32 and torch.is_autocast_enabled("cuda"):
            args = map_leaves(lambda t: t.float() if isinstance(t, Tensor) and t.is_floating_point() else t, args)
        elif name in ("mm", "bmm", "addmm") and any(isinstance(arg, torch.dtype) for arg in args):
            return narrow_product(name, args, kwargs or {}, gpu)
        return Tensor.__torch_function__(func, (), args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name, gpu = kwargs or {}, func.__name__.split(".")[0], GPUS[-1]
        tensors = [leaf for leaf in leaves([args, kwargs]) if isinstance(leaf, Tensor)]
        check_devices(name, tensors)
        check_waits(name, args, gpu)
        if name.startswith(("index_add", "scatter_add")) and has_duplicates(args):
            gpu.atomics.add(name)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if name.startswith(("empty", "new_empty")):
            fill_with_nan(result)
        index = next(tensor.index for tensor in tensors if isinstance(tensor, cls))
        return map_leaves(lambda leaf: on_gpu(leaf, index) if isinstance(leaf, Tensor) else leaf, result)


def on_gpu(tensor: Tensor, index: int) -> Tensor:
    if isinstance(tensor, CudaTensor):
        return tensor
    moved = tensor.as_subclass(CudaTensor)
    moved.index = index
    return moved


def on_host(tensor: Tensor) -> Tensor:
    copy: Tensor = Tensor.__torch_dispatch__(torch.ops.aten.clone.default, (), (tensor,), {})
    return copy


def fill_with_nan(tensor: Tensor) -> Tensor:
    """Fill uninitialized memory with values that spoil every result."""
    if tensor.is_floating_point():
        return tensor.fill_(torch.nan)
    return tensor.fill_(torch.iinfo(tensor.dtype).max) if tensor.dtype != torch.bool else tensor


def check_devices(name: str, tensors: list[Tensor]) -> None:
    """As on CUDA, only numbers, indices and what is copied may come from the host."""
    devices = {tensor.device for tensor in tensors if isinstance(tensor, CudaTensor) or tensor.dim() > 0}
    if len(devices) > 1 and name not in ("copy_", *INDEXING):
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got {devices}")


def check_waits(name: str, args: Any, gpu: Gpu) -> None:
    indices = [index for index in args[1] if index is not None] if name in INDEXING else []
    if name in READS or name.lstrip("_").startswith("unique"):
        gpu.wait(name)
    if any(index.dtype == torch.bool or not isinstance(index, CudaTensor) for index in indices):
        gpu.wait("indexing with a mask, or from the host")
    if name == "copy_" and args[0].device != args[1].device:
        gpu.wait("copy to another device")
    if name == "index_put_" and not isinstance(args[2], CudaTensor):
        gpu.wait("assigning a number at indices")


def has_duplicates(args: Any) -> bool:
    """Whether several values are added to one place."""
    _, dim, index, *_ = args
    index = torch.atleast_1d(on_host(index))
    dim = min(dim, index.dim() - 1)
    return bool((index.sort(dim).values.diff(dim=dim) == 0).any())


def check_cudnn(args: Any, gpu: Gpu) -> None:
    """One dtype, not chosen by autocast (float16), bfloat16 from version 9.13 on, and all weights in one chunk."""
    inputs, states, weights = args[0], [leaf for leaf in leaves(args[1]) if isinstance(leaf, Tensor)], args[2]
    dtypes = {tensor.dtype for tensor in [inputs, *states, *weights]}
    if torch.is_autocast_enabled("cuda"):
        gpu.recurrent_dtypes.add(torch.float16)
        return
    if len(dtypes) > 1:
        raise RuntimeError(f"Input, states and parameters must have one dtype; got {dtypes}")
    if dtypes == {torch.bfloat16} and gpu.cudnn < 91300:
        raise RuntimeError("CUDNN_STATUS_NOT_SUPPORTED")
    gpu.recurrent_dtypes |= dtypes
    end = weights[0].untyped_storage().data_ptr()
    matrices, vectors = [w for w in weights if w.dim() == 2], [w for w in weights if w.dim() == 1]
    for weight in [*matrices, *vectors]:
        if weight.data_ptr() != end or not weight.is_contiguous():
            warnings.warn("RNN module weights are not part of single contiguous chunk of memory", stacklevel=2)
            return
        end += weight.nbytes


def narrow_product(name: str, args: Any, options: Any, gpu: Gpu) -> Tensor:
    """A matmul of bfloat16 factors that returns float32."""
    if not gpu.fused_sums:
        raise RuntimeError("out_dtype is not supported")
    *tensors, dtype = args
    for tensor in tensors[-2:]:
        rows, columns = tensor.stride()[-2:]
        if min(rows, columns) != 1 or max(rows, columns) * tensor.itemsize % 16:
            gpu.misaligned.add(tuple(tensor.shape))
    tensors = [tensor.to(dtype) for tensor in tensors]
    result: Tensor = getattr(torch, name)(*tensors, **options)
    return result


def flatten_parameters(module: nn.RNNBase) -> None:
    """Move the weights into one chunk, as cuDNN wants them."""
    weights = [w for w in module._flat_weights if isinstance(w, CudaTensor)]
    if weights:
        weights.sort(key=lambda weight: -weight.dim())
        parts = torch.cat([weight.detach().flatten() for weight in weights]).split([w.numel() for w in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.data = part.view(weight.shape)


# ---- what replaces torch's functions -------------------------------------------------------------------------------


def factory(create: Callable[..., Tensor], gpu: Gpu) -> Callable[..., Tensor]:
    """A function like `torch.zeros` that understands `device="cuda"`."""

    def created(*args: Any, device: Any = None, **options: Any) -> Tensor:
        if device is None or torch.device(device).type != "cuda":
            return create(*args, device=device, **options)
        index = torch.device(device).index
        result = create(*args, device="cpu", **options)
        if create.__name__ == "empty":
            fill_with_nan(result.detach())
        return on_gpu(result, gpu.current if index is None else index)

    return created


def mover(to: Callable[..., Tensor], gpu: Gpu) -> Callable[..., Tensor]:
    """`Tensor.to` that understands "cuda"."""

    def move(tensor: Tensor, *args: Any, non_blocking: bool = False, copy: bool = False, **options: Any) -> Tensor:
        given = [*args, *options.values()]
        if isinstance(given[0], Tensor):
            given = [given[0].device, given[0].dtype]
        device = next((torch.device(a) for a in given if isinstance(a, str | torch.device)), tensor.device)
        dtype = next((a for a in given if isinstance(a, torch.dtype)), tensor.dtype)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", gpu.current)
        if device == tensor.device:
            return to(tensor, dtype, copy=copy)
        if device.type == "meta" or tensor.is_meta:
            return to(tensor, device, dtype)
        if isinstance(tensor, CudaTensor) or not non_blocking:
            gpu.wait(f"copy from {tensor.device} to {device}")
        moved = to(on_host(tensor), dtype)
        return on_gpu(moved, device.index) if device.type == "cuda" else moved

    return move


def host(device: Any) -> Any:
    return "cpu" if torch.device(device).type == "cuda" else device


def with_host(function: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda kind: function(host(kind))


def swapping(to: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """`Module.to` that may change a parameter's class."""

    def move(module: nn.Module, *args: Any, **options: Any) -> nn.Module:
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return to(module, *args, **options)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    return move


class Event:
    """Times on the host, where everything happens."""

    def __init__(self, **_: Any) -> None:
        self.time = 0.0

    def record(self) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        """The host has nothing to wait for."""

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * (end.time - self.time)


@contextmanager
def emulated_cuda(
    *, capability: tuple[int, int] = (9, 0), cudnn: int = 92000, fused_sums: bool = True
) -> Iterator[Gpu]:
    """Two emulated GPUs inside the context."""
    gpu = Gpu(capability=capability, cudnn=cudnn, fused_sums=fused_sums)
    autocast, generator = torch.autocast, torch.Generator

    class Autocast(autocast):  # type: ignore[misc, valid-type]
        def __init__(self, device_type: str, *args: Any, **options: Any) -> None:
            super().__init__(host(device_type), *args, **options)

    class Generator(generator):  # type: ignore[misc, valid-type]
        def __new__(cls, device: Any = "cpu") -> Any:
            return super().__new__(cls, host(device))

    groups = torch.optim.Optimizer._group_tensors_by_device_and_dtype

    def grouped(lists: Any, *options: Any) -> Any:
        """torch's fused optimizers copy their scalars to the device that a group is on."""
        found = groups(lists, *options)
        return {(tensors[0][0].device, dtype): (tensors, indices) for (_, dtype), (tensors, indices) in found.items()}

    cuda: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: gpu.current,
        "set_device": lambda device: setattr(gpu, "current", torch.device(device).index or 0),
        "synchronize": lambda *_: None,
        "set_sync_debug_mode": lambda mode: setattr(gpu, "forbid_waits", mode == "error"),
        "get_device_name": lambda *_: NAME,
        "get_device_properties": lambda *_: NAME,
        "empty_cache": lambda: None,
        "get_device_capability": lambda *_: gpu.capability,
        "mem_get_info": lambda *_: (1 << 34, 1 << 34),
        "max_memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "is_bf16_supported": lambda *_: True,
        "Event": Event,
    }
    with torch.device("meta"):
        torch.empty(
            0
        )  # at its first use, torch keeps a list of the functions that follow the device: the unpatched ones
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cuda.items():
            patch.setattr(torch.cuda, name, value)
        for name in FACTORIES:
            patch.setattr(torch, name, factory(getattr(torch, name), gpu))
        for name in ("is_autocast_enabled", "get_autocast_dtype"):
            patch.setattr(torch, name, with_host(getattr(torch, name)))
        patch.setattr(torch, "autocast", Autocast)
        patch.setattr(torch, "Generator", Generator)
        patch.setattr(torch.optim.Optimizer, "_group_tensors_by_device_and_dtype", grouped)
        patch.setattr(torch.backends.cudnn, "version", lambda: gpu.cudnn)
        patch.setattr(Tensor, "to", mover(Tensor.to, gpu))
        patch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
        patch.setattr(nn.RNNBase, "flatten_parameters", flatten_parameters)
        patch.setattr(nn.Module, "to", swapping(nn.Module.to))
        GPUS.append(gpu)
        has_wide_sums.cache_clear()
        try:
            yield gpu
        finally:
            GPUS.pop()
            has_wide_sums.cache_clear()
