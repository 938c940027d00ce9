"""`what=step`: our whole training step compared with a plain PyTorch step.

Each stack runs in its own process; they take turns. All train alike: objective, clipping, decay and Adagrad from
`conf/`; only ours makes its batch inside the step. `naive` is nn.Embedding with dense gradients, nn.LSTM,
nn.AdaptiveLogSoftmaxWithLoss (or a linear map with cross_entropy), clip_grad_norm_ and torch.optim.Adagrad;
`naive, fused` is the same with `fused=True`. Both are left out for layers that torch does not have. The classes of
`hsm_sim` are of equal size. "products": the share of the time that the step's matrix products alone take. "of peak":
the speed of the step's matrix products, as a share of that of one large product on the same threads. "peak": all memory
of a step, including weights and optimizer. With `threads=2` and more, times are by the wall clock, the best of all
rounds: measure on a machine that does nothing else.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lm.benchmark.arguments import CountsSettings, fill
from lm.benchmark.candidates import layer_names
from lm.benchmark.measure import MIB, Row, Step, extra_peak_bytes, interleaved_medians, medians_apart, row, write_rows
from lm.benchmark.stacks import (
    NAIVE,
    NAIVE_FUSED,
    OURS,
    PEAK,
    PEAK_SIZE,
    PRODUCTS,
    Parts,
    StepWorkload,
    bare_products,
    embedding_step,
    prepare,
)
from lm.cli import compose_config as compose
from lm.config.schema import TrainConfig
from lm.system.console import say, table
from lm.system.errors import UserError
from lm.system.processor import prepare_processor

TORCH_OUTPUTS = ("adaptive", "full")
"""The layers that torch has too; of the others only our step is timed."""
SMALL_VOCABULARY = 44_000
"""Words of the table whose update is compared with that of the whole vocabulary's."""
EMBEDDING, SMALL_EMBEDDING = "embedding update", "embedding update of a small table"


@dataclass
class StepSettings(CountsSettings):
    """Keys of `what=step`."""

    output: str = "adaptive"
    """Any output layer."""
    embedding: int = 256
    streams: int = 128
    bptt: int = 20
    repeats: int = 7
    threads: int = 1
    memory: bool = True


def main(pairs: dict[str, str]) -> None:
    settings = fill(StepSettings, pairs)
    known = layer_names()
    if settings.output not in known:
        raise UserError(f"output must be one of: {', '.join(known)}; got {settings.output!r}. Try output=adaptive")
    workload = make_workload(settings)
    stacks = stacks_for(workload)
    names = [*stacks, PRODUCTS, PEAK]
    seconds = medians_apart(prepare, names, workload, repeats=settings.repeats, threads=settings.threads)
    parts, updates = time_parts(workload, repeats=settings.repeats)
    peaks: dict[str, int | None] = {}
    if settings.memory:
        peaks = {name: extra_peak_bytes(prepare, name, workload, from_nothing=True) for name in stacks}
    print_tables(seconds | updates, parts, peaks, workload)
    write_rows(report(seconds | updates, parts, peaks, workload), settings.out)


def make_workload(settings: StepSettings) -> StepWorkload:
    sizes = [
        f"model.embedding_size={settings.embedding}",
        f"model.hidden_size={settings.width}",
        f"trainer.batch_size={settings.streams}",
        f"trainer.bptt={settings.bptt}",
    ]
    counts = settings.read_counts()
    config = compose(["experiment=text8", *sizes], name="train", schema=TrainConfig)
    return StepWorkload(counts, settings.cutoffs, settings.output, config, settings.threads)


def stacks_for(workload: StepWorkload) -> tuple[str, ...]:
    return (OURS, NAIVE, NAIVE_FUSED) if workload.output in TORCH_OUTPUTS else (OURS,)


def time_parts(workload: StepWorkload, *, repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of our step's parts, and of updating the input table and a small one."""
    prepare_processor(workload.threads)
    parts = Parts(workload)
    small = replace(workload, counts=workload.counts[:SMALL_VOCABULARY])
    steps: dict[str, Step] = {
        "parts": parts,
        EMBEDDING: embedding_step(workload),
        SMALL_EMBEDDING: embedding_step(small),
    }
    updates = interleaved_medians(steps, repeats=repeats, threads=workload.threads)
    return parts.seconds(), updates


def print_tables(
    seconds: dict[str, float], parts: dict[str, float], peaks: dict[str, int | None], workload: StepWorkload
) -> None:
    say(f"{workload}; {'medians of process' if workload.threads == 1 else 'best wall-clock'} time\n")
    rows = [
        [
            name,
            f"{1e3 * seconds[name]:.0f}",
            f"{workload.tokens / seconds[name]:,.0f}",
            f"{seconds[name] / seconds[OURS]:.2f}",
            f"{seconds[PRODUCTS] / seconds[name]:.0%}",
            f"{of_peak(name, seconds, workload):.0%}",
            "-" if (peak := peaks.get(name)) is None else f"{peak / MIB:,.0f}",
        ]
        for name in stacks_for(workload)
    ]
    per_second = "tokens/cpu s" if workload.threads == 1 else "tokens/s"
    say(table(rows, header=["step", "ms", per_second, "x ours", "products", "of peak", "peak MiB"]))
    speed = 2e-9 * PEAK_SIZE**3 / seconds[PEAK]
    operations = 1e-9 * bare_products(workload).operations
    say(f"\nPeak: {speed:,.0f} GFLOP/s, by a product of {PEAK_SIZE} x {PEAK_SIZE}; a step has {operations:.1f} GFLOP.")
    cells = [[name, f"{1e3 * value:.1f}", f"{share:.1%}"] for name, value, share in _shares(parts)]
    say("\n" + table(cells, header=["part of our step", "ms", "share"]))
    small, large = seconds[SMALL_EMBEDDING], seconds[EMBEDDING]
    say(
        f"\nUpdating the input table takes {1e3 * large:.2f} ms, {large / small:.2f} x the time of a table of "
        f"{SMALL_VOCABULARY:,} words ({1e3 * small:.2f} ms)."
    )


def of_peak(name: str, seconds: dict[str, float], workload: StepWorkload) -> float:
    """The operations of the step's matrix products, over those of a large product in the same time."""
    return bare_products(workload).operations / (2 * PEAK_SIZE**3) * seconds[PEAK] / seconds[name]


def _shares(parts: dict[str, float]) -> Iterator[tuple[str, float, float]]:
    """Each part with its share of the step; the loader runs in its own thread, beside it."""
    whole = sum(parts.values()) - parts["loader"]
    yield from ((name, value, value / whole) for name, value in parts.items())


def report(
    seconds: dict[str, float], parts: dict[str, float], peaks: dict[str, int | None], workload: StepWorkload
) -> Iterator[Row]:
    """`ratio`: time or memory relative to ours; for a part, its share of our step."""
    base = f"step/{len(workload.counts)}/{workload.output}"
    for name in (*stacks_for(workload), PRODUCTS):
        yield row(f"{base}/{name}/time", 1e3 * seconds[name], "ms", seconds[name] / seconds[OURS])
        yield row(f"{base}/{name}/of_peak", 100 * of_peak(name, seconds, workload), "%")
    for name, peak in peaks.items():
        if peak is not None and (ours := peaks[OURS]):
            yield row(f"{base}/{name}/peak_memory", peak / MIB, "MiB", peak / ours)
    for name, value, share in _shares(parts):
        yield row(f"{base}/parts/{name}", 1e3 * value, "ms", share)
    ratio = seconds[EMBEDDING] / seconds[SMALL_EMBEDDING]
    yield row(f"{base}/{EMBEDDING}", 1e3 * seconds[EMBEDDING], "ms", ratio)
