"""`what=gpu`: one report on a GPU, to be made once and sent back.

    python -m lm.benchmark what=gpu                          # the report
    python -m lm.benchmark what=gpu device=cpu sizes=toy     # its form, where there is no GPU

It runs the tests that need a GPU, times every output layer alone and in a whole training step, and compares the
automatic clusters with others. What fails is reported, and the rest goes on.

"host ms": what the host takes to launch a step; where it is no less than the step, launching limits the speed.
"launches": kernels and copies of a step on the GPU (on a CPU, operations). "of peak": the speed of the step's matrix
products, as a share of the speed of one large product in the same precision.
"""

import gc
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from lm.benchmark import clusters
from lm.benchmark.arguments import CountsSettings, fill
from lm.benchmark.candidates import Bench, layer_names, prepare
from lm.benchmark.measure import STEP, Step
from lm.benchmark.stacks import StepWorkload, bare_products, large_product, make_trainer, stepper
from lm.cli import CONF
from lm.cli import compose_config as compose
from lm.config.schema import TrainConfig
from lm.system.arithmetic import check_precision, exact_products, training_products
from lm.system.clock import Clock
from lm.system.console import say, table
from lm.system.devices import pick_device, what_is_missing
from lm.system.errors import UserError
from lm.system.files import write_text
from lm.system.memory import GIB, forget_peak, peak_memory
from lm.system.precision import Precision

ROUNDS = 3
"""Of `steps` steps each; the fastest counts."""
PROFILED = 3
"""Steps whose launches are counted."""
LARGE = {"cuda": 8192, "cpu": 256}
"""Rows and columns of the product whose speed counts as the peak."""


class Size(NamedTuple):
    """A vocabulary with Zipf's counts, and the settings of a model for it."""

    vocab: int
    cutoffs: list[int]
    layers: Sequence[str]
    settings: Sequence[str]


SIZES = {
    "text8": Size(44_372, [2000, 10_000], layer_names(), ["experiment=text8"]),
    # The other layers' weights and optimizer alone would fill most GPUs.
    "one_billion_word": Size(
        793_470, [4000, 40_000, 200_000], ("sampled", "adaptive"), ["experiment=one_billion_word"]
    ),
    "toy": Size(
        300,
        [20, 100],
        ("full", "adaptive"),
        ["model.embedding_size=8", "model.hidden_size=32", "trainer.batch_size=4", "trainer.bptt=5"],
    ),
}


@dataclass
class GpuSettings:
    """Keys of `what=gpu`."""

    device: str = "cuda"
    sizes: list[str] = field(default_factory=lambda: ["text8", "one_billion_word"])
    steps: int = 20
    """Steps between two looks at the clock."""
    tests: bool = True
    """Run the tests that need a GPU first."""
    out: str = "gpu.json"


def main(pairs: dict[str, str]) -> None:
    settings = fill(GpuSettings, pairs)
    if unknown := [name for name in settings.sizes if name not in SIZES]:
        raise UserError(f"sizes must be of {', '.join(SIZES)}; got {unknown[0]!r}. Try sizes=text8")
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            f"what=gpu reports on a GPU, and none is available: {what_is_missing()}. Where there is none, "
            "device=cpu sizes=toy shows what the report looks like."
        )
    device = pick_device(settings.device, key="device")
    exact_products()
    report = Report(settings.out, device)
    if settings.tests:
        report.add("tests", partial(run_tests, Path(CONF).parent, marker="gpu"))
    for precision in precisions(device):
        peak = report.add(f"peak of {precision.value}", partial(peak_speed, precision, device))
        for name in settings.sizes:
            workload = step_workload(SIZES[name], precision)
            for layer in SIZES[name].layers:
                part = partial(measure, replace(workload, output=layer), device, steps=settings.steps, peak=peak)
                report.add(f"{name}/{precision.value}/{layer}", part)
            part = partial(compare_clusters, workload, device, steps=settings.steps)
            report.add(f"{name}/{precision.value}/clusters", part)
    say("\n" + report.table())
    problems = len(report.problems)
    say(
        f"\nEverything is in {settings.out}"
        + (f"; {problems} problem{'s' if problems > 1 else ''} too" if problems else "")
    )


def precisions(device: torch.device) -> Iterator[Precision]:
    """Those that change anything on the device."""
    for precision in Precision:
        if precision is Precision.tf32 and device.type != "cuda":
            continue
        try:
            check_precision(precision, device)
        except UserError:
            continue
        yield precision


# ---- the report ----------------------------------------------------------------------------------------------------


class Report:
    """What was found, and what went wrong, on disk after every part: a GPU's error may end the process."""

    def __init__(self, out: str, device: torch.device) -> None:
        self.out, self.device = Path(out), device
        self.found: dict[str, Any] = {"machine": machine(device)}
        self.problems: dict[str, str] = {}

    def add(self, name: str, part: Callable[[], Any]) -> Any:
        """What `part` returned, or None if it failed."""
        say(f"{name} ...")
        try:
            self.found[name] = part()
        except Exception as error:  # whatever it is, the rest of the report is worth having
            self.problems[name] = f"{type(error).__name__}: {error}"
            say(f"{name} failed: {self.problems[name][:300]}")
        write_text(self.out, json.dumps(self.found | {"problems": self.problems}, indent=1) + "\n")
        gc.collect()
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # some errors of a GPU come back at every later call
                torch.cuda.empty_cache()
        return self.found.get(name)

    def table(self) -> str:
        """A row for every layer of every size and precision."""
        rows = []
        for name, found in self.found.items():
            if isinstance(found, Mapping) and "step ms" in found:
                share = "-" if found["of peak"] is None else f"{found['of peak']:.1%}"
                launches = "-" if found["launches"] is None else f"{found['launches']:.0f}"
                times = [f"{found[key]:.2f}" for key in ("layer ms", "step ms", "host ms")]
                cells = [*name.split("/"), *times, f"{found['tokens/s']:,.0f}", launches, share]
                rows.append([*cells, f"{found['peak GiB']:.2f}"])
        header = ["size", "precision", "layer", "layer ms", "step ms", "host ms", "tokens/s", "launches", "of peak"]
        return table(rows, header=[*header, "peak GiB"])


def machine(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "device": str(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "system": platform.platform(),
    }
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        facts |= {"name": found.name, "capability": [found.major, found.minor], "GiB": found.total_memory / GIB}
        facts |= {"processors": found.multi_processor_count}
    return facts


# ---- its parts -----------------------------------------------------------------------------------------------------


def run_tests(folder: Path, *, marker: str) -> dict[str, Any]:
    """The tests with a marker, in their own process; fails unless all were run and passed."""
    if find_spec("pytest") is None or not (folder / "tests").is_dir():
        return {"ran": False, "why": "pytest or the tests are not here, as in the Docker image; try make test-gpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", marker, "-n", "0", "--tb=short", "tests"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:  # also where pytest crashed, or found no tests
        lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        said = "\n".join([f"pytest ended with exit code {done.returncode}", *lines])
        raise RuntimeError(f"{said}\n\n{done.stdout[-20_000:]}{done.stderr[-2000:]}")
    return {"ran": True, "summary": done.stdout.strip().splitlines()[-1]}


def peak_speed(precision: Precision, device: torch.device) -> float:
    """Operations per second of one large product."""
    size = LARGE[device.type]
    dtype = torch.bfloat16 if precision is Precision.bf16 else torch.float32
    with training_products(precision):
        return 2 * size**3 / time_steps(large_product(size, device=device, dtype=dtype), device, steps=10).wall


class Timing(NamedTuple):
    """Seconds of a step, and what the host takes to launch it."""

    wall: float
    host: float


def time_steps(step: Step, device: torch.device, *, steps: int) -> Timing:
    """Of many steps given to the device at once, as in training."""
    clock, found = Clock(device), []
    for _ in range(3):
        step()  # buffers are made, kernels are found
    for _ in range(ROUNDS):
        clock.synchronise()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        launched = time.perf_counter() - began
        clock.synchronise()
        found.append(Timing((time.perf_counter() - began) / steps, launched / steps))
    return min(found)


def step_workload(size: Size, precision: Precision) -> StepWorkload:
    """For any layer; which one is said when it is measured."""
    settings = [*size.settings, f"trainer.precision={precision.value}"]
    config = compose(settings, name="train", schema=TrainConfig)
    counts = CountsSettings(vocab=size.vocab, cutoffs=size.cutoffs).read_counts()
    return StepWorkload(counts, size.cutoffs, "", config, threads=torch.get_num_threads())


def measure(workload: StepWorkload, device: torch.device, *, steps: int, peak: float | None) -> dict[str, float | None]:
    """An output layer, alone and in the whole step."""
    alone = time_steps(prepare(workload.output, workload.of_layer(device))[STEP], device, steps=steps)
    gc.collect()
    forget_peak(device)
    step = stepper(make_trainer(workload, device))
    whole = time_steps(step, device, steps=steps)
    speed = bare_products(workload).operations / whole.wall
    return {
        "layer ms": 1e3 * alone.wall,
        "step ms": 1e3 * whole.wall,
        "host ms": 1e3 * whole.host,
        "tokens/s": workload.tokens / whole.wall,
        "of peak": speed / peak if peak else None,
        "peak GiB": peak_memory(device) / GIB,
        "launches": count_launches(step, device),
    }


def count_launches(step: Step, device: torch.device) -> float | None:
    """Of one step; None where the profiler sees nothing of the GPU, as without its library."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    with profile(activities=activities) as found:
        for _ in range(PROFILED):
            step()
        Clock(device).synchronise()
    if on_gpu:
        events = [event for event in found.events() or () if event.device_type == DeviceType.CUDA]
        events = [event for event in events if not event.is_user_annotation]
    else:
        events = [event for event in found.events() or () if event.name.startswith("aten::")]
    return len(events) / PROFILED if events else None


class DeviceBench(Bench):
    """Measures on its device, whose time is not the process's."""

    def measure(self, choices: Mapping[str, Sequence[int]]) -> dict[str, float]:
        return {
            name: time_steps(prepare("adaptive", self.workload(cutoffs))[STEP], self.device, steps=self.repeats).wall
            for name, cutoffs in choices.items()
        }


def compare_clusters(workload: StepWorkload, device: torch.device, *, steps: int) -> dict[str, Any]:
    """The cost model measured here, and the automatic clusters beside fixed ones."""
    with tempfile.TemporaryDirectory() as folder:
        bench = DeviceBench.measured(workload.of_layer(device), repeats=steps, cache_dir=Path(folder))
    return {"cost model": asdict(bench.model), "rows": list(clusters.compare(bench, given=workload.cutoffs))}
