"""Settings of the commands that train, prepare and count, with their defaults."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from lm.config.groups import DataConfig, InputConfig, ModelConfig, OptimConfig, OutputConfig, Schedule
from lm.config.rules import Count, OptionalCount, OptionalSeconds, Range, Resumable
from lm.system.precision import Precision


@dataclass
class TrainerConfig:
    """Truncated back-propagation through time over contiguous streams."""

    batch_size: Count = 16
    """Streams read in parallel."""
    bptt: Count = 20
    """Steps through which gradients flow; the state is carried on."""
    micro_batches: Count = 1
    """Groups that a step's streams are computed in, one after the other: less memory, the same update; 1 is fastest."""
    precision: Precision = Precision.fp32
    """Products of training in float32, TF32 (GPUs) or bfloat16; weights, sums and evaluations are always float32."""
    max_epochs: Annotated[int | None, Range(least=1), Resumable] = 10
    """The run ends after this many passes over the training text; the first limit reached ends it."""
    max_steps: Annotated[int | None, Range(least=1), Resumable] = None
    """Or after this many updates."""
    max_tokens: Annotated[int | None, Range(least=1), Resumable] = None
    """Or after this many training tokens."""
    max_seconds: Annotated[float | None, Range(above=0), Resumable] = None
    """Seconds of training; evaluation has its own clock."""
    eval_every_steps: OptionalCount = None
    """Steps between evaluations; the end of every epoch is always evaluated."""
    eval_every_seconds: OptionalSeconds = None
    """Training seconds between evaluations."""
    log_every_steps: Annotated[int, Range(least=1), Resumable] = 50
    """Steps between log lines."""
    save_every_steps: Annotated[int | None, Range(least=1), Resumable] = None
    """Steps between checkpoints."""
    save_every_seconds: Annotated[float | None, Range(above=0), Resumable] = 600.0
    """A checkpoint is also written at every evaluation and when the run is stopped."""
    device: Annotated[str, Resumable] = "auto"
    """auto, cpu, cuda or cuda:N."""
    profile: Annotated[bool, Resumable] = False
    """Trace a few steps into the run directory, and list their costliest operations."""
    dry_run: Annotated[bool, Resumable] = False
    """Say shapes, memory and time, as two real steps show them, and end without a run directory."""
    threads: Annotated[int | None, Range(least=1, below=4097), Resumable] = None
    """CPU threads; null for all cores, or one for training if a step is too small to gain from more."""
    patience: Annotated[int | None, Range(least=1), Resumable] = None
    """Evaluations in a row without a better perplexity after which the run ends; null waits for the limits."""
    average: Annotated[float | None, Range(least=0.001, below=1)] = None
    """Decay of a moving average of the weights (for example 0.999), which evaluations then use; null for none."""

    def problems(self) -> Iterator[str]:
        if all(v is None for v in (self.max_epochs, self.max_steps, self.max_tokens, self.max_seconds)):
            yield (
                "trainer.max_epochs, max_steps, max_tokens and max_seconds must not all be null: the run would never "
                "end. Try trainer.max_epochs=5"
            )
        if self.micro_batches > self.batch_size:
            yield (
                f"trainer.micro_batches must not exceed batch_size ({self.batch_size}), whose streams it groups; "
                f"got {self.micro_batches}. Try trainer.micro_batches={self.batch_size}"
            )
        yield from device_problems("trainer.device", self.device)


def device_problems(key: str, device: str) -> Iterator[str]:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        yield f"{key} must be auto, cpu, cuda or cuda:N; got {device!r}. Try {key}=auto"


@dataclass
class ScoringConfig:
    """How a split is scored; see `lm.model.scoring`."""

    streams: Count = 16
    """Contiguous pieces the split is cut into; part of the figure's definition."""
    batch_size: Annotated[int, Range(least=1), Resumable] = 16
    """Pieces computed at once; cannot change a figure."""


@dataclass
class TrainConfig:
    """Everything `train.py` takes."""

    data: DataConfig
    input: InputConfig
    model: ModelConfig
    output: OutputConfig
    optim: OptimConfig
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    evaluate: ScoringConfig = field(default_factory=ScoringConfig)
    seed: Annotated[int, Range(least=0)] = 1
    """Weights, dropout and sampling are functions of it and of the step."""
    run_dir: Annotated[str | None, Resumable] = None
    """Where the run writes; null makes a fresh, readable name under runs/."""
    resume: Annotated[str | None, Resumable] = None
    """null starts a new run; `auto` continues; a run directory or checkpoint continues that one."""
    init: str | None = None
    """A run directory or checkpoint whose weights a new run begins with, word by word; null begins with fresh ones."""
    verify: Annotated[bool, Resumable] = True
    """Compare the checkpoint and the corpus with their checksums while reading; false is faster for large ones."""

    def problems(self) -> Iterator[str]:
        for key in ("run_dir", "resume", "init"):
            if getattr(self, key) == "":
                yield f"{key} must not be empty. Try {key}=null"
        if self.trainer.dry_run and self.resume is not None:
            yield f"trainer.dry_run=true is for a run that is not begun; got resume={self.resume}. Try resume=null"
        if self.model.tie and self.model.width != self.model.embedding_size:
            yield (
                "model.tie=true needs word vectors as wide as the hidden states: model.embedding_size must be "
                f"{self.model.width}; got {self.model.embedding_size}. Try model.embedding_size={self.model.width}, or "
                f"model.projection={self.model.embedding_size} where the core has a projection"
            )
        yield from self.input.problems_beside(self.output, tied=self.model.tie)
        if self.model.maxent.order and not self.output.supports_maxent:
            yield (
                "model.maxent.order needs output=adaptive, full, hsm_freq or hsm_sim, the layers that can add n-gram "
                f"weights to their scores; got output={self.output.name}. Try output=hsm_freq, or "
                "model.maxent.order=null"
            )
        if self.optim.schedule is Schedule.halve_after_half and self.trainer.max_epochs is None:
            yield (
                "optim.schedule=halve_after_half needs trainer.max_epochs, whose half it halves after; got null. "
                "Try trainer.max_epochs=10"
            )


@dataclass
class PrepareConfig:
    """Everything `python -m lm.prepare` takes."""

    data: DataConfig


class Discount(Enum):
    """How Kneser-Ney smoothing takes from n-grams that were seen."""

    single = "single"
    modified = "modified"


@dataclass
class NgramConfig:
    """Everything `python -m lm.ngram` takes."""

    data: DataConfig
    order: Annotated[int, Range(least=1, most=9)] = 5
    """Words of the longest n-grams."""
    discount: Discount = Discount.modified
    """`modified` takes another amount from n-grams counted once, twice, and three times or more; `single` the same."""
    min_counts: list[int] = field(default_factory=lambda: [1])
    """For each order, occurrences below which an n-gram is left out; the last number counts for the orders after it."""
    arpa: str | None = None
    """A model in the ARPA format, plain or .gz, to read instead of counting; its words must be those of the data."""
    out: str | None = None
    """Where to write the model in the ARPA format; compressed if the name ends in .gz."""
    run_dir: str | None = None
    """Where the run writes; null makes a fresh, readable name under runs/."""

    def problems(self) -> Iterator[str]:
        counts = self.min_counts
        if not counts or counts[0] != 1 or counts != sorted(counts) or len(counts) > self.order:
            yield (
                f"min_counts must begin with 1, never fall and name at most {self.order} orders; got {counts}. "
                "Try min_counts=[1,1,2]"
            )
        for key in ("arpa", "out", "run_dir"):
            if getattr(self, key) == "":
                yield f"{key} must not be empty. Try {key}=null"
