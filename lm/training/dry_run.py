"""`trainer.dry_run=true`: report shapes, parameters, memory and time from a few real steps, without writing a run."""

import torch

from lm.config.schema import TrainConfig
from lm.data.batches import TrainingText
from lm.data.corpus import Corpus
from lm.model.language_model import LanguageModel, build_model
from lm.output.clusters.choice import ClusterChoice
from lm.system.console import duration, say, table
from lm.system.devices import Clock
from lm.system.memory import free_memory, peak_memory, size_of
from lm.training import report
from lm.training.memory_check import MemoryCheck
from lm.training.trainer import Trainer

STEPS = 2
"""Timed steps, after one warm-up step."""


def dry_run(
    config: TrainConfig, *, corpus: Corpus, streams: TrainingText, device: torch.device, clusters: ClusterChoice | None
) -> None:
    """Print what a run with these settings would look like."""
    # Without Brown classes, which take minutes: the shapes are the same for any classes of that number.
    trainer = Trainer(build_model(config, corpus.vocabulary).to(device), streams=streams, config=config)
    say(report.opening(trainer, corpus=corpus, run="none: trainer.dry_run=true", clusters=clusters))
    say(f"\n{parameter_table(trainer.model)}\n\n{batch_shapes(config, streams)}")
    estimate = MemoryCheck(corpus.vocabulary, streams, device).estimate(config)
    seconds = seconds_per_step(trainer)
    free = free_memory(device)
    say(
        f"memory   about {size_of(estimate.total)}: {estimate}\n"
        f"         {size_of(peak_memory(device))} at the peak of this process"
        f"{'' if free is None else f', {size_of(free)} still free'}\n"
        f"time     {time_needed(trainer, seconds=seconds)}\n"
        f"Nothing of this run is kept; its corpus and the measurements for its clusters stay in {config.data.root}."
    )


def parameter_table(model: LanguageModel) -> str:
    rows: list[list[object]] = [
        [name, " x ".join(map(str, weight.shape)), f"{weight.numel():,}", size_of(weight.numel() * 4)]
        for name, weight in model.named_parameters()
    ]
    return table(rows, header=["parameter", "shape", "numbers", "memory"])


def batch_shapes(config: TrainConfig, streams: TrainingText) -> str:
    steps, num_streams = min(config.trainer.bptt, streams.tokens_per_epoch), config.trainer.batch_size
    width = config.model.width
    groups = f", in {config.trainer.micro_batches} groups of streams" if config.trainer.micro_batches > 1 else ""
    return (
        f"step     {steps} x {num_streams} words{groups} -> embedded {steps} x {num_streams} x "
        f"{config.model.embedding_size} -> hidden {steps} x {num_streams} x {width} -> loss\n"
        f"epoch    {streams.steps_per_epoch:,} steps, {streams.tokens_per_epoch:,} tokens"
    )


def seconds_per_step(trainer: Trainer) -> float:
    """Measure the mean step time on the first batches."""
    clock = Clock(trainer.device)
    with trainer.batches() as batches:
        for step, batch in zip(range(1 + STEPS), batches, strict=False):
            if step == 1:
                clock.start()
            trainer.step(batch)
        clock.stop()
    return clock.seconds / STEPS


def time_needed(trainer: Trainer, *, seconds: float) -> str:
    config, steps = trainer.config.trainer, trainer.planned_steps
    tokens = trainer.streams.tokens_per_epoch / trainer.streams.steps_per_epoch
    speed = f"{1000 * seconds:,.1f} ms a step, {tokens / seconds:,.0f} tokens/s"
    whole = [] if steps is None else [steps * seconds]
    whole += [] if config.max_seconds is None else [config.max_seconds]
    return f"{speed}; about {duration(min(whole))} of training, evaluations not counted"
