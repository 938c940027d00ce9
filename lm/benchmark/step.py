"""`what=step`: the whole training step, against the step that one would write with torch alone.

Each runs in a process of its own, ours set up as `train.py` sets itself up, and steps are taken in turn. All do the
same training: objective, clipping, decay and Adagrad by `conf/`; only ours makes its batch within the step. `naive` is
nn.Embedding with its dense gradient, nn.LSTM, nn.AdaptiveLogSoftmaxWithLoss (or a linear map and cross_entropy),
clip_grad_norm_, torch.optim.Adagrad; `naive, fused` is the same with `fused=True`. "products" is the share of the time
that the step's bare matrix products take; "peak" is all the memory that a step needs, weights and optimizer included.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from lm.benchmark.counts import CountsSettings
from lm.benchmark.layers import MIB
from lm.benchmark.measure import Step, extra_peak_bytes, interleaved_medians, medians_apart
from lm.benchmark.rows import Row, write_rows
from lm.benchmark.stacks import (
    NAIVE,
    NAIVE_FUSED,
    OURS,
    PRODUCTS,
    Parts,
    StepWorkload,
    embedding_step,
    prepare,
)
from lm.config.command_line import compose
from lm.config.commands import TrainConfig
from lm.output.clusters.partition import check_cutoffs
from lm.system.console import table
from lm.system.errors import UserError
from lm.system.processor import prepare_processor

STACKS = (OURS, NAIVE, NAIVE_FUSED)
OUTPUTS = ("adaptive", "full")
SMALL_VOCABULARY = 44_000
"""Words of the table whose update is compared with that of the whole vocabulary's."""
EMBEDDING, SMALL_EMBEDDING = "embedding update", "embedding update of a small table"


@dataclass
class StepSettings(CountsSettings):
    """Keys of `what=step`."""

    cutoffs: list[int] = field(default_factory=lambda: [2000, 10_000])
    output: str = "adaptive"
    """`adaptive` or `full`."""
    embedding: int = 256
    width: int = 512
    """Of the LSTM."""
    streams: int = 128
    bptt: int = 20
    repeats: int = 7
    threads: int = 1
    memory: bool = True
    out: str = "benchmark.json"


def run_step(settings: StepSettings) -> None:
    """Measure, print, write."""
    if settings.output not in OUTPUTS:
        raise UserError(f"output must be one of: {', '.join(OUTPUTS)}; got {settings.output!r}. Try output=adaptive")
    workload = make_workload(settings)
    seconds = medians_apart(prepare, [*STACKS, PRODUCTS], workload, repeats=settings.repeats)
    parts, updates = time_parts(workload, repeats=settings.repeats)
    peaks = {}
    if settings.memory:
        peaks = {name: extra_peak_bytes(prepare, name, workload, from_nothing=True) for name in STACKS}
    print_tables(seconds | updates, parts, peaks, workload)
    write_rows(report(seconds | updates, parts, peaks, workload), settings.out)


def make_workload(settings: StepSettings) -> StepWorkload:
    counts = settings.read_counts()
    cutoffs = check_cutoffs(settings.cutoffs, vocab_size=len(counts))
    sizes = [
        f"model.embedding_size={settings.embedding}",
        f"model.hidden_size={settings.width}",
        f"trainer.batch_size={settings.streams}",
        f"trainer.bptt={settings.bptt}",
    ]
    config = compose(["experiment=text8", *sizes], name="train", schema=TrainConfig)
    return StepWorkload(counts, cutoffs, settings.output, config, settings.threads)


def time_parts(workload: StepWorkload, *, repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of our step's parts, and of the input table's update beside that of a small table."""
    prepare_processor(workload.threads)
    parts = Parts(workload)
    small = replace(workload, counts=workload.counts[:SMALL_VOCABULARY])
    steps: dict[str, Step] = {EMBEDDING: embedding_step(workload), SMALL_EMBEDDING: embedding_step(small)}
    updates = interleaved_medians({"parts": parts, **steps}, repeats=repeats)
    return parts.medians(), updates


def print_tables(
    seconds: dict[str, float],
    parts: dict[str, float],
    peaks: dict[str, int | None],
    workload: StepWorkload,
) -> None:
    """The stacks, our step's parts, and what the input table costs."""
    config = workload.config
    cutoffs = f" {workload.cutoffs}" if workload.output == "adaptive" else ""
    print(
        f"{len(workload.counts):,} words, {workload.output}{cutoffs}, LSTM {config.model.hidden_size}, embedding "
        f"{config.model.embedding_size}, {config.trainer.batch_size} x {config.trainer.bptt} tokens, threads "
        f"{workload.threads}; medians of process time\n"
    )
    rows = []
    for name in STACKS:
        peak = peaks.get(name)
        rows.append(
            [
                name,
                f"{1e3 * seconds[name]:.0f}",
                f"{workload.tokens / seconds[name]:,.0f}",
                f"{seconds[name] / seconds[OURS]:.2f}",
                f"{seconds[PRODUCTS] / seconds[name]:.0%}",
                "-" if peak is None else f"{peak / MIB:,.0f}",
            ]
        )
    print(table(rows, header=["step", "ms", "tokens/cpu s", "x ours", "products", "peak MiB"]))
    whole = sum(parts.values()) - parts["loader"]
    cells = [[name, f"{1e3 * value:.1f}", f"{value / whole:.1%}"] for name, value in parts.items()]
    print("\n" + table(cells, header=["part of our step", "ms", "share"]))
    small, large = seconds[SMALL_EMBEDDING], seconds[EMBEDDING]
    print(
        f"\nThe update of the input table takes {1e3 * large:.2f} ms, {large / small:.2f} times that of a table of "
        f"{SMALL_VOCABULARY:,} words ({1e3 * small:.2f} ms)."
    )


def report(
    seconds: dict[str, float], parts: dict[str, float], peaks: dict[str, int | None], workload: StepWorkload
) -> Iterator[Row]:
    """The same as records; `ratio` is how many times ours the other is, or a part's share."""
    base = f"step/{len(workload.counts)}/{workload.output}"
    for name in (*STACKS, PRODUCTS):
        ratio = seconds[name] / seconds[OURS]
        yield {"name": f"{base}/{name}/time", "value": 1e3 * seconds[name], "unit": "ms", "ratio": ratio}
    for name, peak in peaks.items():
        ours = peaks[OURS]
        if peak is not None and ours:
            yield {"name": f"{base}/{name}/peak_memory", "value": peak / MIB, "unit": "MiB", "ratio": peak / ours}
    whole = sum(parts.values()) - parts["loader"]
    for part, value in parts.items():
        yield {"name": f"{base}/parts/{part}", "value": 1e3 * value, "unit": "ms", "ratio": value / whole}
    ratio = seconds[EMBEDDING] / seconds[SMALL_EMBEDDING]
    yield {"name": f"{base}/{EMBEDDING}", "value": 1e3 * seconds[EMBEDDING], "unit": "ms", "ratio": ratio}
