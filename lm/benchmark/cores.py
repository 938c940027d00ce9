"""`what=cores`: time of a training step with every core.

"core": forward and backward pass of the core alone. "x torch": how many times faster it is than torch's module of the
same kind and size, and the whole step than a plain PyTorch step around that module.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from lm.benchmark.arguments import fill
from lm.benchmark.measure import Row, Step, interleaved_medians, medians_apart, row, write_rows
from lm.benchmark.stacks import NAIVE_FUSED, OURS, PLAIN_CORES, StepWorkload, prepare
from lm.benchmark.step import StepSettings, make_workload
from lm.cli import compose_config as compose
from lm.config.registry import find_plugin, plugin_names
from lm.config.schema import TrainConfig
from lm.model.state import map_state
from lm.system.console import say, table
from lm.system.processor import prepare_processor

Seconds = dict[str, dict[str, float]]
"""Of the core alone and of the whole step: ours and, where torch has the core too, its own."""


def main(pairs: dict[str, str]) -> None:
    settings = fill(StepSettings, pairs)
    base = make_workload(settings)
    times = {name: measure(with_core(base, name), repeats=settings.repeats) for name in plugin_names("model")}
    say(f"{base}; medians of process time\n")
    rows = []
    for name, found in times.items():
        cells = [(f"{1e3 * part[OURS]:.1f}", _ratio(part)) for part in found.values()]
        shown = [text for ms, ratio in cells for text in (ms, "-" if ratio is None else f"{ratio:.2f}")]
        rows.append([name, *shown])
    say(table(rows, header=["core", "core ms", "x torch", "step ms", "x torch"]))
    write_rows(report(times), settings.out)


def with_core(workload: StepWorkload, name: str) -> StepWorkload:
    """The same workload with another core of the same widths."""
    sizes = workload.config.model
    model = compose([f"model={name}"], name="train", schema=TrainConfig).model
    model = model.resized(hidden_size=sizes.hidden_size, embedding_size=sizes.embedding_size)
    return replace(workload, config=replace(workload.config, model=model))


def measure(workload: StepWorkload, *, repeats: int) -> Seconds:
    stacks = [OURS, NAIVE_FUSED] if workload.config.model.name in PLAIN_CORES else [OURS]
    step = medians_apart(prepare, stacks, workload, repeats=repeats)
    prepare_processor(workload.threads)
    return {"core": interleaved_medians(core_steps(workload), repeats=repeats), "step": step}


def core_steps(workload: StepWorkload) -> dict[str, Step]:
    """Forward and backward pass of our core and of torch's over the same embedded words."""
    config = workload.config
    steps, streams = config.trainer.bptt, config.trainer.batch_size
    input_TBE = torch.randn(steps, streams, config.model.embedding_size, requires_grad=True)
    core = find_plugin("model", config.model.name).target(config.model)
    state = core.initial_state(streams, device=torch.device("cpu"))
    gradient_TBD = torch.randn(steps, streams, core.width)
    works: dict[str, Step] = {OURS: lambda: core(input_TBE, state, None)[0].backward(gradient_TBD)}
    if config.model.name in PLAIN_CORES:
        plain = PLAIN_CORES[config.model.name](config.model.embedding_size, config.model.hidden_size)
        (layer_state,) = map_state(torch.clone, state)
        works[NAIVE_FUSED] = lambda: plain(input_TBE, layer_state)[0].backward(gradient_TBD)
    return works


def _ratio(seconds: dict[str, float]) -> float | None:
    return seconds[NAIVE_FUSED] / seconds[OURS] if NAIVE_FUSED in seconds else None


def report(times: dict[str, Seconds]) -> Iterator[Row]:
    """`ratio`: how many times faster than torch's."""
    for name, found in times.items():
        for part, seconds in found.items():
            yield row(f"cores/{name}/{part}", 1e3 * seconds[OURS], "ms", _ratio(seconds))
