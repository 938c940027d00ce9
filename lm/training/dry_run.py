"""A look at a run before it is begun: shapes, parameters, memory and time, from two real steps that leave no files."""

import torch

from lm.config.schema import TrainConfig
from lm.data.batches import Streams
from lm.data.corpus import Corpus
from lm.model.build import build_model
from lm.model.language_model import LanguageModel
from lm.output.clusters.choice import ClusterChoice
from lm.system.clock import Clock
from lm.system.console import duration, say, table
from lm.system.memory import free_memory, peak_memory, size_of
from lm.training import report
from lm.training.memory_check import MemoryCheck
from lm.training.trainer import Trainer

STEPS = 2
"""Timed, after one that is not: the first one finds kernels and makes buffers."""


def dry_run(
    config: TrainConfig, *, corpus: Corpus, streams: Streams, device: torch.device, choice: ClusterChoice | None
) -> None:
    """Say what a run of these settings would be, and end."""
    # Brown classes, which take minutes, are left to the run: the shapes are the same with any classes of that number.
    model = build_model(config, corpus.vocabulary).to(device)
    say(report.opening(config, model, corpus=corpus, run="none: trainer.dry_run=true", choice=choice))
    say(f"\n{parameter_table(model)}\n\n{batch_shapes(config, streams)}")
    estimate = MemoryCheck(corpus.vocabulary, streams, device).estimate(config)
    trainer = Trainer(model, streams=streams, config=config)
    seconds = seconds_per_step(trainer)
    free = free_memory(device)
    say(
        f"memory   about {size_of(estimate.total)}: {estimate}\n"
        f"         {size_of(peak_memory(device))} at the peak of this process"
        f"{'' if free is None else f', {size_of(free)} still free'}\n"
        f"time     {time_needed(trainer, seconds=seconds)}\n"
        f"Nothing of this run is kept; its corpus and what was measured for its clusters stay in {config.data.root}."
    )


def parameter_table(model: LanguageModel) -> str:
    rows: list[list[object]] = [
        [name, " x ".join(map(str, weight.shape)), f"{weight.numel():,}", size_of(weight.numel() * 4)]
        for name, weight in model.named_parameters()
    ]
    return table(rows, header=["parameter", "shape", "numbers", "memory"])


def batch_shapes(config: TrainConfig, streams: Streams) -> str:
    steps, num_streams = min(config.trainer.bptt, streams.length), config.trainer.batch_size
    width = config.model.width
    groups = f", in {config.trainer.micro_batches} groups of streams" if config.trainer.micro_batches > 1 else ""
    return (
        f"step     {steps} x {num_streams} words{groups} -> embedded {steps} x {num_streams} x "
        f"{config.model.embedding_size} -> hidden {steps} x {num_streams} x {width} -> loss\n"
        f"epoch    {streams.steps_per_epoch:,} steps, {streams.length * num_streams:,} tokens"
    )


def seconds_per_step(trainer: Trainer) -> float:
    """Train for real on the first batches; the model is the caller's, and is not kept."""
    clock = Clock(trainer.device)
    with trainer.loader() as loader:
        for step, batch in zip(range(1 + STEPS), loader, strict=False):
            if step == 1:
                clock.start()
            trainer.train_step(batch.to(trainer.device))
        clock.stop()
    return clock.seconds / STEPS


def time_needed(trainer: Trainer, *, seconds: float) -> str:
    config, steps = trainer.config.trainer, trainer.planned_steps
    tokens = config.batch_size * min(config.bptt, trainer.streams.length)
    speed = f"{1000 * seconds:,.1f} ms a step, {tokens / seconds:,.0f} tokens/s"
    whole = [] if steps is None else [steps * seconds]
    whole += [] if config.max_seconds is None else [config.max_seconds]
    return f"{speed}; about {duration(min(whole))} of training, evaluations not counted"
