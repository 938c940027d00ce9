"""Training step of every output layer, core (`--group model`) or input, compared with torch's modules.

    python -m benchmarks.layers
    python -m benchmarks.layers --group model

Output layers: forward and backward pass of the layer alone. "x full" and "x torch": how many times faster the layer is
than the full softmax and than torch's adaptive softmax.

Cores: "core ms" is the core alone, "step ms" the whole training step. "x torch": how many times faster than torch's
module of the same kind and size, and than a plain PyTorch step with that module.

Inputs: parameters and time of the whole training step, relative to the table.
"""

import argparse
from collections.abc import Iterator, Sequence

import torch

from benchmarks import workloads as work
from benchmarks.harness import Record, Step, interleaved_medians, medians_apart, report, run, sized_parser
from benchmarks.workloads import OURS, TORCH_ADAPTIVE, TORCH_CORES, TUNED, Workload
from lm.config.groups import find_plugin, plugin_names
from lm.model.language_model import count_parameters
from lm.system.console import say
from lm.system.devices import prepare_cpu
from lm.system.tree import map_leaves


def main(words: Sequence[str] | None = None) -> None:
    parser = sized_parser(__doc__)
    parser.add_argument("--group", choices=["output", "model", "input"], default="output")
    names = plugin_names("output")
    parser.add_argument("--layers", nargs="+", choices=names, default=names, metavar="LAYER", help="output layers")
    run(measure, parser, words)


def measure(arguments: argparse.Namespace) -> None:
    workload = Workload.from_arguments(arguments)
    say(str(workload))
    if arguments.group == "output":
        torch.set_num_threads(arguments.threads)
        records = output_records(arguments.layers, workload, repeats=arguments.repeats)
    else:
        prepare_cpu(arguments.threads)
        compare = core_records if arguments.group == "model" else input_records
        records = compare(workload, repeats=arguments.repeats)
    report(records, out=arguments.out)


def output_records(layers: list[str], workload: Workload, *, repeats: int) -> Iterator[Record]:
    names = [*layers, TORCH_ADAPTIVE] if "adaptive" in layers else layers
    steps = {name: work.layer_step(name, workload) for name in names}
    seconds = interleaved_medians(steps, repeats=repeats, threads=workload.threads)
    for name in names:
        references = {"x full": "full", "x torch": TORCH_ADAPTIVE}
        ratios = {column: seconds[other] / seconds[name] for column, other in references.items() if other in seconds}
        yield {"layer": name, "ms": 1e3 * seconds[name], **ratios}


def core_records(workload: Workload, *, repeats: int) -> Iterator[Record]:
    for name in plugin_names("model"):
        chosen, record = workload.using("model", name), Record(core=name)
        steps = core_steps(chosen)
        core = interleaved_medians(steps, repeats=repeats, threads=workload.threads)
        step = medians_apart(work.stack_step, list(steps), chosen, repeats=repeats, threads=workload.threads)
        for kind, seconds in (("core", core), ("step", step)):
            ours, torchs = seconds[OURS], seconds.get(TUNED)
            record |= {f"{kind} ms": 1e3 * ours, f"{kind} x torch": torchs and torchs / ours}
        yield record


def core_steps(workload: Workload) -> dict[str, Step]:
    """Forward and backward pass of our core and of torch's over the same embedded words."""
    config, trainer = workload.config.model, workload.config.trainer
    input_TBE = torch.randn(trainer.bptt, trainer.batch_size, config.embedding_size, requires_grad=True)
    core = find_plugin("model", config.name).target(config)
    state = core.initial_state(trainer.batch_size, device=workload.device)
    gradient_TBD = torch.randn(trainer.bptt, trainer.batch_size, core.width)
    steps: dict[str, Step] = {OURS: lambda: core(input_TBE, state, None)[0].backward(gradient_TBD)}
    if config.name in TORCH_CORES:
        plain = TORCH_CORES[config.name](config.embedding_size, config.hidden_size)
        (layer_state,) = map_leaves(torch.clone, state)
        steps[TUNED] = lambda: plain(input_TBE, layer_state)[0].backward(gradient_TBD)
    return steps


def input_records(workload: Workload, *, repeats: int) -> Iterator[Record]:
    trainers = {name: work.make_trainer(workload.using("input", name)) for name in plugin_names("input")}
    steps = {name: work.step_on_device(trainer) for name, trainer in trainers.items()}
    seconds = interleaved_medians(steps, repeats=repeats, threads=workload.threads)
    parameters = {name: count_parameters(trainer.model.input) for name, trainer in trainers.items()}
    for name in trainers:
        yield {
            "input": name,
            "parameters": parameters[name],
            "parameters x table": parameters[name] / parameters["table"],
            "step ms": 1e3 * seconds[name],
            "step x table": seconds[name] / seconds["table"],
        }


if __name__ == "__main__":
    main()
