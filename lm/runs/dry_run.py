"""A look at a run before it is begun: shapes, parameters, memory and time, from two real steps that leave no files."""

import torch

from lm.config.commands import TrainConfig
from lm.data.batches import BatchLoader, Streams
from lm.data.corpus import Corpus
from lm.model.dropout import DropoutMasks
from lm.model.language_model import LanguageModel
from lm.optim.optimizer import build_optimizer
from lm.output.clusters.choice import ClusterChoice
from lm.output.generated import compile_loss
from lm.runs import report
from lm.runs.assembly import build_model
from lm.runs.memory_estimate import training_needs
from lm.system.clock import Clock
from lm.system.console import duration, say, table
from lm.system.memory import free_memory, peak_memory, size_of
from lm.training.step import ForwardBackward
from lm.training.trainer import planned_steps

STEPS = 2
"""Timed, after one that is not: the first one finds kernels and makes buffers."""


def dry_run(
    config: TrainConfig, *, corpus: Corpus, streams: Streams, device: torch.device, choice: ClusterChoice | None
) -> None:
    """Say what a run of these settings would be, and end."""
    # Brown classes, which take minutes, are left to the run: the shapes are the same with any classes of that number.
    model = build_model(config, corpus.vocabulary).to(device).train()
    if config.trainer.compile:
        compile_loss(model.output, device=device, notice=say)
    say(report.opening(config, model, corpus=corpus, choice=choice, run="none: trainer.dry_run=true"))
    say(f"\n{parameter_table(model)}\n\n{batch_shapes(config, streams)}")
    needs = training_needs(config, corpus.vocabulary)
    seconds = seconds_per_step(config, model, streams=streams)
    free = free_memory(device)
    say(
        f"memory   about {size_of(needs.total)}: {needs}\n"
        f"         {size_of(peak_memory(device))} at the peak of this process"
        f"{'' if free is None else f', {size_of(free)} still free'}\n"
        f"time     {time_needed(config, streams, seconds=seconds)}\n"
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


def seconds_per_step(config: TrainConfig, model: LanguageModel, *, streams: Streams) -> float:
    """Train for real on the first batches; the model is the caller's, and is not kept."""
    device = model.device
    optimizer = build_optimizer(model, config.optim)
    forward_backward = ForwardBackward(model, precision=config.trainer.precision)
    clock, state = Clock(device), model.core.initial_state(config.trainer.batch_size, device=device)
    micro_batches, pin = config.trainer.micro_batches, device.type == "cuda"
    with BatchLoader(
        streams,
        model.output.plans,
        seed=config.seed,
        start=0,
        pin=pin,
        micro_batches=micro_batches,
        plan_input=model.input.plan,
        look_back=model.output.look_back,
    ) as loader:
        for step, batch in zip(range(1 + STEPS), loader, strict=False):
            if step == 1:
                clock.start()
            masks = DropoutMasks.of_batch(config.seed, step, config.trainer.batch_size)
            loss, state = forward_backward(batch.to(device), state, masks)
            optimizer.step(loss, lr=config.optim.lr, num_steps=len(batch.targets_TB))
        clock.stop()
    return clock.seconds / STEPS


def time_needed(config: TrainConfig, streams: Streams, *, seconds: float) -> str:
    tokens = config.trainer.batch_size * min(config.trainer.bptt, streams.length)
    speed = f"{1000 * seconds:,.1f} ms a step, {tokens / seconds:,.0f} tokens/s"
    steps, limit = planned_steps(config.trainer, streams), config.trainer.max_seconds
    whole = [] if steps is None else [steps * seconds]
    whole += [] if limit is None else [limit]
    return f"{speed}; about {duration(min(whole))} of training, evaluations not counted"
