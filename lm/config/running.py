"""Training and scoring: limits, logging, devices."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from lm.config.rules import Count, MayChange, OptionalCount, OptionalSeconds, Range
from lm.system.precision import Precision


@dataclass
class TrainerConfig:
    """Truncated back-propagation through time over contiguous streams."""

    batch_size: Count
    """Streams read in parallel."""
    bptt: Count
    """Steps through which gradients flow; the state is carried on."""
    micro_batches: Count
    """Groups that a step's streams are computed in, one after the other: less memory, the same update; 1 is fastest."""
    precision: Precision
    """Products of training in float32, TF32 (GPUs) or bfloat16; weights, sums and evaluations are always float32."""
    compile: bool
    """Generate code for the output layer's passes over its logits; meant for GPUs, gains nothing on a CPU."""
    max_epochs: Annotated[int | None, Range(least=1), MayChange]
    """The run ends after this many passes over the training text; the first limit reached ends it."""
    max_steps: Annotated[int | None, Range(least=1), MayChange]
    """Or after this many updates."""
    max_tokens: Annotated[int | None, Range(least=1), MayChange]
    """Or after this many training tokens."""
    max_seconds: Annotated[float | None, Range(above=0), MayChange]
    """Seconds of training; evaluation has its own clock."""
    eval_every_steps: OptionalCount
    """Steps between evaluations; the end of every epoch is always evaluated."""
    eval_every_seconds: OptionalSeconds
    """Training seconds between evaluations."""
    log_every_steps: Annotated[int, Range(least=1), MayChange]
    """Steps between log lines."""
    save_every_steps: Annotated[int | None, Range(least=1), MayChange]
    """Steps between checkpoints."""
    save_every_seconds: Annotated[float | None, Range(above=0), MayChange]
    """A checkpoint is also written at every evaluation and when the run is stopped."""
    device: Annotated[str, MayChange]
    """auto, cpu, cuda or cuda:N."""
    profile: Annotated[bool, MayChange]
    """Trace a few steps into the run directory, and list their costliest operations."""
    dry_run: Annotated[bool, MayChange]
    """Say shapes, memory and time, as two real steps show them, and end without a run directory."""
    threads: Annotated[int | None, Range(least=1, below=4097), MayChange]
    """CPU threads; null for all cores, or one for training if a step is too small to gain from more."""
    patience: Annotated[int | None, Range(least=1), MayChange] = None
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
    """How a split is scored; see `lm.inference.scoring`."""

    streams: Count
    """Contiguous pieces the split is cut into; part of the figure's definition."""
    batch_size: Annotated[int, Range(least=1), MayChange]
    """Pieces computed at once; cannot change a figure."""
