"""`what=inputs`: the training step with every input, its parameters and its time, compared with the table's."""

from collections.abc import Iterator
from dataclasses import replace

from lm.benchmark.arguments import fill
from lm.benchmark.measure import Row, interleaved_medians, row, write_rows
from lm.benchmark.stacks import make_trainer, stepper
from lm.benchmark.step import StepSettings, make_workload
from lm.cli import compose_config as compose
from lm.config.registry import plugin_names
from lm.config.schema import TrainConfig
from lm.model.language_model import count_parameters
from lm.system.console import say, table
from lm.system.processor import prepare_processor

TABLE = "table"


def main(pairs: dict[str, str]) -> None:
    settings = fill(StepSettings, pairs)
    base = make_workload(settings)
    prepare_processor(base.threads)
    trainers = {}
    for name in plugin_names("input"):
        chosen = compose([f"input={name}"], name="train", schema=TrainConfig).input
        trainers[name] = make_trainer(replace(base, config=replace(base.config, input=chosen)))
    steps = {name: stepper(trainer) for name, trainer in trainers.items()}
    seconds = interleaved_medians(steps, repeats=settings.repeats)
    parameters = {name: count_parameters(trainer.model.input) for name, trainer in trainers.items()}
    say(f"{base}; medians of process time\n")
    rows = [
        [
            name,
            f"{parameters[name]:,}",
            f"{parameters[name] / parameters[TABLE]:.4f}",
            f"{1e3 * seconds[name]:.1f}",
            f"{seconds[name] / seconds[TABLE]:.2f}",
        ]
        for name in trainers
    ]
    say(table(rows, header=["input", "parameters", "x table", "step ms", "x table"]))
    write_rows(report(parameters, seconds), settings.out)


def report(parameters: dict[str, int], seconds: dict[str, float]) -> Iterator[Row]:
    """`ratio`: relative to the table."""
    for name in seconds:
        yield row(f"inputs/{name}/parameters", parameters[name], "", parameters[name] / parameters[TABLE])
        yield row(f"inputs/{name}/step", 1e3 * seconds[name], "ms", seconds[name] / seconds[TABLE])
