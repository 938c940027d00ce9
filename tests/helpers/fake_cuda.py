"""Run training steps on fake CUDA tensors, on a machine without a GPU.

    python -m tests.helpers.fake_cuda LIBRARY < variations        # prints JSON: settings to error

torch detects devices once per process, so the library of a device that does nothing (`fake_cuda.cpp`)
must be loaded before torch.
"""

import ctypes
import json
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE = Path(__file__).with_suffix(".cpp")


def compile_library(folder: Path) -> Path:
    """Compile the library; raises RuntimeError without a working compiler."""
    compiler, torch_package = which("c++") or which("g++"), find_spec("torch")
    if compiler is None:
        raise RuntimeError("no C++ compiler here")
    assert torch_package is not None and torch_package.origin is not None
    torch_folder, library = (
        Path(torch_package.origin).parent,
        folder / f"fake_cuda{sysconfig.get_config_var('SHLIB_SUFFIX')}",
    )
    lib = torch_folder / "lib"
    command = [compiler, "-std=c++20", "-O0", "-fPIC", "-shared", f"-I{torch_folder / 'include'}", str(SOURCE)]
    command += ["-o", str(library), f"-L{lib}", f"-Wl,-rpath,{lib}", "-ltorch_cpu", "-lc10"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the fake device does not compile here: {done.stderr[-500:]}")
    return library


def run_steps(library: Path, variations: list[str], *, timeout: float) -> dict[str, str]:
    """Run a step of each variation of the tiny settings; return its error, or ""."""
    command = [sys.executable, "-m", "tests.helpers.fake_cuda", str(library)]
    done = subprocess.run(
        command, input="\n".join(variations), cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    ctypes.CDLL(sys.argv[1])
    import torch

    # Autocast would turn itself off without a GPU.
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *_: True
    torch.set_num_threads(1)
    kernels = add_shapes()  # noqa: F841, they go when it goes
    with TemporaryDirectory() as folder:
        step = partial(one_step, folder=folder)
        print(json.dumps({variation: error_of(step, variation) for variation in sys.stdin.read().splitlines()}))


def add_shapes() -> object:
    """Register the output shapes of kernels for which torch has no meta implementation."""
    import torch

    def gru_cell(gates_BG, _, hidden_BH, *biases):  # noqa: ARG001
        return torch.empty_like(hidden_BH), gates_BG.new_empty(len(gates_BG), 5 * hidden_BH.shape[1])

    def gru_cell_backward(grad_BH, _, has_bias):
        gates_BG = grad_BH.new_empty(len(grad_BH), 3 * grad_BH.shape[1])
        bias_G = gates_BG[0] if has_bias else None
        return gates_BG, torch.empty_like(gates_BG), torch.empty_like(grad_BH), bias_G, bias_G

    library = torch.library.Library("aten", "IMPL", "Meta")
    library.impl("_fused_adagrad_", lambda *_, **__: None)
    library.impl("_thnn_fused_gru_cell", gru_cell)
    library.impl("_thnn_fused_gru_cell_backward", gru_cell_backward)
    return library


def error_of(step: Callable[[str], None], variation: str) -> str:
    try:
        step(variation)
    except Exception as error:  # any error, shown by the test
        return f"{type(error).__name__}: {error}"
    return ""


def one_step(variation: str, *, folder: str) -> None:
    """Build model and plans on the host; run the step on the fake device."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from lm.data.batches import BatchLoader
    from lm.data.prepare import open_corpus
    from lm.model.build import build_model, word_classes
    from lm.training.memory_check import make_fake
    from lm.training.setup import training_streams
    from lm.training.trainer import Trainer
    from tests.conftest import TINY, composed
    from tests.helpers.no_sync import NoHostSync

    config = composed(*TINY, f"data.root={folder}", *variation.split())
    corpus = open_corpus(config.data)
    model = build_model(config, corpus.vocabulary, classes=word_classes(config, corpus))
    streams = training_streams(config, corpus)
    options = {"seed": config.seed, "micro_batches": config.trainer.micro_batches}
    batch = BatchLoader(streams, model, start=0, pin=False, **options).make(0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        make_fake(model, torch.device("cuda"))
        trainer = Trainer(model, streams=streams, config=config)
        batch = batch.to(torch.device("cuda"))
        with NoHostSync():
            trainer.step(batch)
    assert trainer.loss_sum.device.type == "cuda"
    assert all(parameter.device.type == "cuda" for parameter in model.parameters())


if __name__ == "__main__":
    main()
