"""A complete report on one GPU, made once and sent back.

    python -m benchmarks.gpu                               # the report
    python -m benchmarks.gpu --device cpu --sizes toy      # a trial run without a GPU

Runs the tests that use a GPU, times every output layer alone and in a whole training step, the adaptive softmax with
more streams and in parts, a plain PyTorch step ("PyTorch, tuned" of benchmarks.step), the all-reduce of several GPUs,
and compares the automatic clusters with others. A failure is recorded, and the report continues.

"host ms": time the host needs to launch a step; if it is no less than "step ms", launching limits the speed. "loop ms":
a step of the real loop, with its loader and copies. "launches": kernels and copies of a step on the GPU (on a CPU,
operations). "of peak": speed of the step's matmuls, as a share of the speed of one large matmul in the same precision.
"equal bits": whether ten steps, run twice, end with the same weights.
"""

import argparse
import gc
import hashlib
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from benchmarks import workloads as work
from benchmarks.clusters import Bench, compare
from benchmarks.harness import Record, Step, make_parser, print_records, read_counts, run
from benchmarks.step import Parts
from benchmarks.workloads import TUNED, Workload
from lm.cli import CONF
from lm.cli import compose_config as compose
from lm.config.groups import plugin_names
from lm.config.schema import TrainConfig
from lm.system.console import say
from lm.system.devices import Clock, Precision, check_precision, disable_tf32, matmul_precision, pick_device
from lm.system.errors import UserError
from lm.system.files import write_json
from lm.system.memory import GIB, peak_memory, reset_peak_memory
from lm.training.provenance import commit

TOY = ["model.embedding_size=8", "model.hidden_size=32", "trainer.batch_size=4", "trainer.bptt=5"]
SIZES = {
    "text8": (44_372, [2000, 10_000], ["experiment=text8"], plugin_names("output")),
    # Weights and optimizer of the other layers alone would fill most GPUs.
    "one_billion_word": (793_470, [4000, 40_000, 200_000], ["experiment=one_billion_word"], ["sampled", "adaptive"]),
    "toy": (300, [20, 100], TOY, ["full", "adaptive"]),
}
"""Vocabulary size, cutoffs, settings, and the output layers to measure."""
PEAK_SIZES = {"cuda": 8192, "cpu": 256}
"""Size of the large matmul."""
STREAMS = (512, 2048)
QUERY = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
EXCHANGED = 1 << 26
"""Numbers in the all-reduce: 256 MiB."""


def main(words: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(repeats=20, out="gpu.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["text8", "one_billion_word"])
    parser.add_argument("--no-tests", dest="tests", action="store_false", help="skip the tests that need a GPU")
    run(measure, parser, words)


def measure(arguments: argparse.Namespace) -> None:
    device = pick_device(arguments.device, key="--device")
    disable_tf32()
    report = Report(arguments.out, device)
    if arguments.tests:
        report.add("tests", partial(run_tests, Path(CONF).parent))
    report.add("all-reduce GB/s", all_reduce_speed)
    for precision in precisions(device):
        peak = report.add(f"peak of {precision}", partial(peak_speed, precision, device))
        for name in arguments.sizes:
            for part, run_part in parts_of_report(name, precision, device, steps=arguments.repeats, peak=peak):
                report.add(f"{name}/{precision}/{part}", run_part)
    print_records([found for found in report.results.values() if isinstance(found, dict) and "step ms" in found])
    say(f"\nThe report is in {arguments.out}; parts that failed: {', '.join(report.problems) or 'none'}.")


def parts_of_report(
    name: str, precision: Precision, device: torch.device, *, steps: int, peak: float | None
) -> Iterator[tuple[str, Callable[[], Any]]]:
    workload = sized_workload(name, precision, device)
    for layer in SIZES[name][-1]:
        yield layer, partial(measure_layer, layer, workload, steps=steps, peak=peak)
    for streams in STREAMS if device.type == "cuda" else ():
        trainer = replace(workload.config.trainer, batch_size=streams)
        larger = replace(workload, config=replace(workload.config, trainer=trainer))
        yield f"adaptive, {streams} streams", partial(measure_layer, "adaptive", larger, steps=steps, peak=peak)
    adaptive = workload.using("output", "adaptive")
    yield "parts", partial(parts_of_step, adaptive, steps)
    yield TUNED, lambda: 1e3 * time_steps(work.plain_step(adaptive, tuned=True), device, steps=steps)[0]
    yield "clusters", partial(compare_clusters, workload, steps)


def precisions(device: torch.device) -> Iterator[Precision]:
    """Precisions that differ on the device."""
    for precision in get_args(Precision):
        with suppress(UserError):
            check_precision(precision, device)
            if precision != "tf32" or device.type == "cuda":
                yield precision


class Report:
    """Results and failures, on disk after every part, because a GPU error may end the process."""

    def __init__(self, out: str, device: torch.device) -> None:
        self.out = Path(out)
        self.results: dict[str, Any] = {"machine": machine(device)}
        self.problems: dict[str, str] = {}

    def add(self, name: str, part: Callable[[], Any]) -> Any:
        """Run `part` and return its result, or None if it failed."""
        say(f"{name} ...")
        try:
            self.results[name] = part()
        except Exception as error:  # the rest of the report is still useful
            self.problems[name] = f"{type(error).__name__}: {error}"
            say(f"{name} failed: {self.problems[name][:300]}")
        write_json(self.out, self.results | {"problems": self.problems})
        gc.collect()
        with suppress(RuntimeError):  # some GPU errors are raised again by every later call
            torch.cuda.empty_cache()
        return self.results.get(name)


def machine(device: torch.device) -> dict[str, Any]:
    return {
        "device": str(device),
        "gpu": str(torch.cuda.get_device_properties(device)) if device.type == "cuda" else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "driver and clocks": subprocess.getoutput(f"nvidia-smi --format=csv --query-gpu={QUERY}"),
        "commit": commit(Path(CONF).parent),
        "system": f"{platform.platform()}, Python {platform.python_version()}",
    }


def all_reduce_speed() -> float | None:
    """W of docs/scaling.md, by NCCL over all GPUs of this process; None for fewer than two."""
    ranks = torch.cuda.device_count()
    if ranks < 2:
        return None
    tensors = [torch.ones(EXCHANGED, device=f"cuda:{rank}") for rank in range(ranks)]
    seconds, _ = time_steps(partial(torch.cuda.nccl.all_reduce, tensors), torch.device("cuda:0"), steps=10)
    return 2 * (ranks - 1) / ranks * 4 * EXCHANGED / seconds / 1e9


def parts_of_step(workload: Workload, steps: int) -> list[Record]:
    parts = Parts(workload)
    for _ in range(3 + steps):
        parts()
    del parts.rounds[:2]  # records() skips another one
    return parts.records()


def weights_after(workload: Workload, *, steps: int = 10) -> str:
    """Hash the weights after a few steps; another call must return the same."""
    torch.manual_seed(0)
    trainer = work.make_trainer(workload)
    step, hashed = work.step_on_device(trainer), hashlib.sha256()
    for _ in range(steps):
        step()
    for weight in trainer.model.parameters():
        hashed.update(weight.detach().cpu().numpy().tobytes())
    return hashed.hexdigest()


def run_tests(folder: Path, *, marker: str = "gpu") -> str:
    """Run the tests with a marker in a separate process; return pytest's summary, or raise if any failed."""
    if find_spec("pytest") is None or not (folder / "tests").is_dir():
        return "not run: pytest or the tests are not here, as in the Docker image; try make test-gpu"
    command = [sys.executable, "-m", "pytest", "-q", "-m", marker, "-n", "0", "--tb=short", "tests"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:  # also if pytest crashed or found no tests
        raise RuntimeError(f"pytest exit code {done.returncode}\n{done.stdout[-20_000:]}{done.stderr[-2000:]}")
    return done.stdout.strip().splitlines()[-1]


def time_steps(step: Step, device: torch.device, *, steps: int) -> tuple[float, float]:
    """Time a step and its launch, with `steps` queued without synchronizing, as in training."""
    clock, timings = Clock(device), []
    for _ in range(3):
        step()  # allocate buffers, select kernels
    for _ in range(3):  # the fastest round counts
        clock.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        launched = time.perf_counter() - began
        clock.synchronize()
        timings.append(((time.perf_counter() - began) / steps, launched / steps))
    return min(timings)


def peak_speed(precision: Precision, device: torch.device) -> float:
    """FLOP/s of one large matmul."""
    size = PEAK_SIZES[device.type]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    with matmul_precision(precision):
        return 2 * size**3 / time_steps(work.large_matmul(size, device=device, dtype=dtype), device, steps=10)[0]


def sized_workload(name: str, precision: Precision, device: torch.device) -> Workload:
    vocab, cutoffs, settings, _ = SIZES[name]
    config = compose([*settings, f"trainer.precision={precision}"], name="train", schema=TrainConfig)
    counts = read_counts(argparse.Namespace(counts="zipf", vocab=vocab, cutoffs=cutoffs))
    return Workload(counts, cutoffs, config, torch.get_num_threads(), device)


def measure_layer(name: str, workload: Workload, *, steps: int, peak: float | None) -> Record:
    """Measure an output layer alone and within the whole step."""
    device, workload = workload.device, workload.using("output", name)
    alone = time_steps(work.layer_step(name, workload), device, steps=steps)[0]
    gc.collect()
    reset_peak_memory(device)
    trainer = work.make_trainer(workload)
    step = work.step_on_device(trainer)
    whole, host = time_steps(step, device, steps=steps)
    with trainer.batches() as batches:
        loaded = iter(batches)
        loop = time_steps(lambda: trainer.step(next(loaded)), device, steps=steps)[0]
    return {
        "words": len(workload.counts),
        "precision": workload.config.trainer.precision,
        "layer": name,
        "streams": workload.config.trainer.batch_size,
        "layer ms": 1e3 * alone,
        "step ms": 1e3 * whole,
        "host ms": 1e3 * host,
        "loop ms": 1e3 * loop,
        "tokens/s": workload.tokens / whole,
        "launches": count_launches(step, device),
        "of peak": work.step_flops(workload) / whole / peak if peak else None,
        "peak GiB": peak_memory(device) / GIB,
        "equal bits": str(weights_after(workload) == weights_after(workload)),
    }


def count_launches(step: Step, device: torch.device, *, steps: int = 3) -> float | None:
    """Count a step's launches; None if the profiler cannot observe the GPU."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])) as profiler:
        for _ in range(steps):
            step()
        Clock(device).synchronize()
    events = profiler.events() or []
    if on_gpu:
        launches = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    else:
        launches = [e for e in events if e.name.startswith("aten::")]
    return len(launches) / steps if launches else None


def compare_clusters(workload: Workload, steps: int) -> dict[str, Any]:
    """Measure this device's cost model and compare automatic clusters with fixed ones."""

    def timer(layers: Mapping[str, Step]) -> dict[str, float]:
        return {name: time_steps(step, workload.device, steps=steps)[0] for name, step in layers.items()}

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench.of(replace(workload, threads=1), timer=timer, cache=Path(folder))
    return {"cost model": asdict(bench.costs.model), "clusters": list(compare(bench))}


if __name__ == "__main__":
    main()
