"""Estimate the memory of a training step on fake tensors; advise when it does not fit; dry runs.

One real training step runs on fake tensors, which have shapes and devices but no memory. A ledger records the bytes
in use. Settings that cannot fit are rejected before anything is allocated: on a CPU, the kernel would
let the process grow and then kill it without a message.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lm.config.groups import find_plugin
from lm.config.schema import TrainConfig
from lm.config.validate import find_problems
from lm.data.batches import BatchLoader, TrainingText, to_device
from lm.data.corpus import Corpus
from lm.data.text.vocabulary import Vocabulary
from lm.model.language_model import LanguageModel, build_model
from lm.model.regularization import DropoutMasks
from lm.optim.optimizer import build_optimizer
from lm.output.clusters.choice import ClusterChoice, head_size, shares_of
from lm.output.clusters.partition import ClusteredConfig
from lm.system.console import duration, say, table
from lm.system.devices import Clock
from lm.system.errors import UserError
from lm.system.memory import FakeTensorMode, Ledger, explain_oom, free_memory, num_bytes, peak_memory, size_of
from lm.training import report
from lm.training.step import ForwardBackward
from lm.training.trainer import Trainer

OOM_FACTOR = 1.1
"""Reject settings whose estimate exceeds free memory by this factor."""
TARGET_USAGE = 0.9
"""Suggested settings use at most this fraction of free memory."""
OBVIOUS_USAGE = 0.1
"""Skip the estimate if parameters and logits use less than this fraction of free memory."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak bytes of a training step."""

    parameters: int
    """Weights, plus their EMA if enabled."""
    optimizer: int
    step: int
    """Activations, logits and gradients."""

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + self.step

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {size_of(getattr(self, field.name))}" for field in fields(self))


@dataclass(frozen=True)
class MemoryCheck:
    """Memory estimates and advice for training on one corpus and device."""

    vocabulary: Vocabulary
    streams: TrainingText
    device: torch.device
    num_ranks: int = 1

    def estimate(self, config: TrainConfig) -> MemoryEstimate:
        """Estimate one rank's memory for a training step; assumes automatic clusters are a head and one tail."""
        model = meta_model(config, self.vocabulary).train()
        num_streams = config.trainer.batch_size // self.num_ranks
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            make_fake(model, self.device)
            optimizer = build_optimizer(model, config.optim)
            state = model.core.initial_state(num_streams, device=self.device)
        batch = BatchLoader(
            self.streams,
            model,
            seed=config.seed,
            start=0,
            pin=False,
            micro_batches=config.trainer.micro_batches,
            columns=slice(0, num_streams),
        ).make(0)
        batch = replace(batch, num_tokens=sum(plan.num_scored for plan in batch.plans))  # those of one rank
        masks = DropoutMasks(
            config.seed, 0, config.trainer.batch_size, slice(0, num_streams), locked=config.model.locked_dropout
        )
        # cuDNN's backward pass cannot run on fake tensors; torch's native kernels need about as much memory.
        with torch.backends.cudnn.flags(enabled=False), mode, Ledger() as ledger:
            run_step = ForwardBackward(model, precision=config.trainer.precision)
            losses, _ = run_step(to_device(batch, self.device), state, masks)
            optimizer.step(losses[0], lr=config.optim.lr, num_steps=1)
        parameters = num_bytes(list(model.parameters()))
        # Ranks exchange gradients in buckets, which hold a copy of the output layer's gradients.
        buckets = num_bytes([p for p in model.output.parameters() if p.requires_grad]) if self.num_ranks > 1 else 0
        return MemoryEstimate(
            parameters=parameters if config.trainer.average is None else 2 * parameters,
            optimizer=num_bytes(optimizer.state_dict()),
            step=ledger.peak + buckets,
        )

    def require_fit(self, config: TrainConfig) -> None:
        """Raise UserError for settings that clearly need more memory than is free, before allocating anything."""
        free = free_memory(self.device)
        try:
            needed = num_bytes(list(meta_model(config, self.vocabulary).parameters()))
            needed += config.trainer.batch_size * config.trainer.bptt * len(self.vocabulary) * 4
            if free is None or needed < OBVIOUS_USAGE * free:
                return
            estimate = self.estimate(config)
        except RuntimeError:  # sizes whose product overflows
            raise UserError(
                f"model.hidden_size={config.model.hidden_size}, model.embedding_size={config.model.embedding_size} and "
                f"{len(self.vocabulary):,} words need more bytes than can be counted. Try model=lstm."
            ) from None
        if estimate.total > OOM_FACTOR * free:
            raise UserError(
                f"These settings need about {size_of(estimate.total)} of memory ({estimate}), but {size_of(free)} are "
                f"free on {self.device}. {self.advice(config, free=free)}"
            )

    def explain_oom(self, config: TrainConfig) -> AbstractContextManager[None]:
        """Convert out-of-memory errors during training into advice."""
        free = free_memory(self.device)  # before the run allocates anything
        advice = partial(self.advice, config, free=free)
        return explain_oom(self.device, doing="building or training the model", advice=advice)

    def advice(self, config: TrainConfig, *, free: int | None) -> str:
        """Suggest the smallest change of settings that fits into free memory."""
        now = self.estimate(config).total
        # The estimate may have been too low, so require a clear reduction.
        budget = TARGET_USAGE * min(now, free if free is not None else now)
        for setting, changed in remedies(config, num_words=len(self.vocabulary), num_ranks=self.num_ranks):
            needed = self.estimate(changed).total
            if needed <= budget:
                return f"Try {setting}, which needs about {size_of(needed)} instead of {size_of(now)}."
        return f"These settings need about {size_of(now)}, and no single change suffices. Try a smaller model."


def meta_model(config: TrainConfig, vocabulary: Vocabulary) -> LanguageModel:
    """Build the model on the meta device, for its shapes."""
    output = config.output
    if isinstance(output, ClusteredConfig) and output.cutoffs == "auto":
        head = head_size(shares_of(vocabulary.counts), coverage=output.head_coverage)
        cutoffs = [head] if head < len(vocabulary) else []
        config = replace(config, output=replace(output, cutoffs=cutoffs))
    with torch.device("meta"):
        return build_model(config, vocabulary)


def make_fake(model: nn.Module, device: torch.device) -> None:
    """Replace a model's parameters and buffers with fake tensors on a device; call inside FakeTensorMode."""
    moved: dict[Tensor, nn.Parameter] = {}  # tied weights stay tied
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in moved:
                fake = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                moved[parameter] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
            setattr(module, name, moved[parameter])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


def remedies(config: TrainConfig, *, num_words: int, num_ranks: int) -> Iterator[tuple[str, TrainConfig]]:
    """Yield settings that save memory, starting with those that affect training least."""
    trainer, model = config.trainer, config.model
    groups = trainer.micro_batches
    while 2 * groups <= trainer.batch_size // num_ranks:
        groups *= 2
        yield f"trainer.micro_batches={groups}", replace(config, trainer=replace(trainer, micro_batches=groups))
    size = model.maxent.size
    while model.maxent.order and size // 2 >= num_words:  # as long as every softmax fits
        size //= 2
        fewer = replace(model, maxent=replace(model.maxent, size=size))
        yield f"model.maxent.size={size}", replace(config, model=fewer)
    if config.output.name != "adaptive" and not model.tie:
        yield "output=adaptive", replace(config, output=find_plugin("output", "adaptive").settings())
    hidden, embedding, projection = model.hidden_size, model.embedding_size, getattr(model, "projection", None)
    while max(hidden, embedding) > 16:
        hidden, embedding = (hidden, embedding // 2) if embedding > hidden else (hidden // 2, embedding)
        if projection is not None and projection >= hidden:
            projection = hidden // 2
        if model.tie and projection is not None:
            embedding = projection = min(embedding, projection)
        elif model.tie:
            hidden = embedding = min(hidden, embedding)
        sizes: dict[str, Any] = {"hidden_size": hidden, "embedding_size": embedding}
        sizes |= {} if projection is None else {"projection": projection}
        smaller = replace(model, **sizes)
        if not find_problems(asdict(smaller), type(smaller)):
            yield " ".join(f"model.{key}={size}" for key, size in sizes.items()), replace(config, model=smaller)


# ---- dry runs --------------------------------------------------------------------------------------------------------


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
