"""Settings of train.py, lm.prepare and lm.ngram, with their defaults."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from lm.config.groups import (
    Count,
    DataConfig,
    InputConfig,
    ModelConfig,
    OptimConfig,
    OptionalCount,
    OptionalSeconds,
    OutputConfig,
    Range,
    Resumable,
)

Features = Literal["ngram5", "skip5", "skip10"]
MIN_RANDOM_BPTT = 10
"""Below this, the standard deviation of random BPTT lengths would exceed half of their mean."""


@dataclass
class TrainerConfig:
    """Truncated back-propagation through time over contiguous streams."""

    batch_size: Count = 16
    """Streams read in parallel."""
    bptt: Count = 20
    """Steps of truncated BPTT; the hidden state carries over to the next batch."""
    random_bptt: bool = False
    """Vary the length of BPTT around trainer.bptt from step to step, as AWD-LSTM does."""
    micro_batches: Count = 1
    """Gradient-accumulation steps: less activation memory, same update. 1 is fastest."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Matmuls of training in float32, TF32 (GPUs) or bfloat16. Weights, sums and evaluations are always float32."""
    ddp_compression: Literal["none", "bf16"] = "none"
    """Several ranks exchange the gradients of core and output layer in float32, or in half the bytes as bfloat16."""
    max_epochs: Annotated[int | None, Range(least=1), Resumable] = 10
    """Epochs. The run ends at the first of its limits."""
    max_steps: Annotated[int | None, Range(least=1), Resumable] = None
    """Limit on optimizer steps."""
    max_tokens: Annotated[int | None, Range(least=1), Resumable] = None
    """Limit on training tokens."""
    max_seconds: Annotated[float | None, Range(above=0), Resumable] = None
    """Limit on training time, without evaluations."""
    eval_every_steps: OptionalCount = None
    """Steps between evaluations, in addition to one after every epoch."""
    eval_every_seconds: OptionalSeconds = None
    """Training seconds between evaluations, in addition to one after every epoch."""
    log_every_steps: Annotated[int, Range(least=1), Resumable] = 50
    """Steps between records of training metrics."""
    save_every_steps: Annotated[int | None, Range(least=1), Resumable] = None
    """Steps between checkpoints."""
    save_every_seconds: Annotated[float | None, Range(above=0), Resumable] = 600.0
    """Seconds between checkpoints, in addition to one after every evaluation and when the run is stopped."""
    device: Annotated[str, Resumable] = "auto"
    """auto, cpu, cuda or cuda:N; auto prefers a GPU."""
    profile: Annotated[bool, Resumable] = False
    """Profile a few steps: print the slowest operations, write a trace into the run directory."""
    dry_run: Annotated[bool, Resumable] = False
    """Print shapes, memory and time of a few real steps, then exit without creating a run directory."""
    threads: Annotated[int | None, Range(least=1, below=4097), Resumable] = None
    """CPU threads; null for all cores, or one if a training step is too small to gain from more."""
    patience: Annotated[int | None, Range(least=1), Resumable] = None
    """Early stopping: evaluations in a row without a better validation perplexity; null disables it."""
    average: Annotated[Literal["asgd"] | float | None, Range(least=0.001, below=1)] = None
    """Average the weights for evaluations: the decay of an EMA (0.999), or `asgd` (NT-ASGD); null for no averaging."""

    def problems(self) -> Iterator[str]:
        if all(v is None for v in (self.max_epochs, self.max_steps, self.max_tokens, self.max_seconds)):
            yield (
                "trainer.max_epochs, max_steps, max_tokens and max_seconds must not all be null: the run would never "
                "end. Try trainer.max_epochs=5."
            )
        if self.micro_batches > self.batch_size:
            yield (
                f"trainer.micro_batches must not exceed trainer.batch_size ({self.batch_size}); "
                f"got {self.micro_batches}. Try trainer.micro_batches={self.batch_size}."
            )
        if self.random_bptt and self.bptt < MIN_RANDOM_BPTT:
            yield (
                f"trainer.random_bptt=true needs trainer.bptt of at least {MIN_RANDOM_BPTT}; got {self.bptt}. "
                "Try trainer.bptt=70."
            )
        yield from device_problems("trainer.device", self.device)


def device_problems(key: str, device: str) -> Iterator[str]:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        yield f"{key} must be auto, cpu, cuda or cuda:N; got {device!r}. Try {key}=auto."


@dataclass
class ScoringConfig:
    """How a split is scored; see `lm.model.scoring`."""

    streams: Count = 16
    """Contiguous pieces that a split is cut into; part of the definition of the perplexity."""
    batch_size: Annotated[int, Range(least=1), Resumable] = 16
    """Pieces scored in parallel; does not change the result."""
    max_tokens: OptionalCount = None
    """Score only the first tokens of a split, for slow layers; null for all. Unit conversions use the whole split."""


@dataclass
class TrainConfig:
    """Settings of `train.py`."""

    data: DataConfig
    input: InputConfig
    model: ModelConfig
    output: OutputConfig
    optim: OptimConfig
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    evaluate: ScoringConfig = field(default_factory=ScoringConfig)
    seed: Annotated[int, Range(least=0)] = 1
    """Seed of weights, dropout and sampling."""
    run_dir: Annotated[str | None, Resumable] = None
    """Run directory; null creates one under runs/."""
    resume: Annotated[str | None, Resumable] = None
    """`auto` continues run_dir, or the newest unfinished run with these settings; or a run directory or checkpoint."""
    init: str | None = None
    """Initialize weights from this run directory or checkpoint, matching words; null for random weights."""
    verify: Annotated[bool, Resumable] = True
    """Check the checksums of checkpoint and corpus; false starts faster with large files."""

    @property
    def scoring_streams(self) -> int:
        """`evaluate.streams`, or 0 if lines are scored one by one."""
        return 0 if self.data.sequences == "lines" else self.evaluate.streams

    def problems(self) -> Iterator[str]:
        if self.trainer.dry_run and self.resume is not None:
            yield f"trainer.dry_run=true needs a new run; got resume={self.resume}. Try resume=null."
        if self.model.tie and self.model.width != self.model.embedding_size:
            yield (
                "model.tie=true needs word vectors as wide as the hidden states: model.embedding_size must be "
                f"{self.model.width}; got {self.model.embedding_size}. Try model.embedding_size={self.model.width}, or "
                f"model.projection={self.model.embedding_size} if the core has a projection."
            )
        yield from self.input.check_compatible(self.output, tied=self.model.tie)
        if self.model.maxent.order and not self.output.supports_maxent:
            yield (
                "model.maxent.order needs an output layer that supports n-gram weights: adaptive, full, hsm_freq or "
                f"hsm_sim; got output={self.output.name}. Try output=hsm_freq, or "
                "model.maxent.order=null."
            )
        if self.data.sequences == "lines" and self.trainer.random_bptt:
            yield "trainer.random_bptt needs data.sequences=stream; got lines. Try trainer.random_bptt=false."
        if self.optim.schedule == "halve_after_half" and self.trainer.max_epochs is None:
            yield ("optim.schedule=halve_after_half needs trainer.max_epochs; got null. Try trainer.max_epochs=10.")


@dataclass
class PrepareConfig:
    """Settings of `python -m lm.prepare`."""

    data: DataConfig


@dataclass
class NgramConfig:
    """Settings of `python -m lm.ngram`."""

    data: DataConfig
    features: Features | None = None
    """Train a sparse non-negative matrix model (SNM) on n-grams of up to 5 words (`ngram5`), on these and skip-grams
    (`skip5`), or on n-grams of up to 10 words and skip-grams (`skip10`). null: count Kneser-Ney n-grams."""
    order: Annotated[int, Range(least=1, most=9)] = 5
    """Order of the model: 5 for 5-grams."""
    discount: Literal["single", "modified"] = "modified"
    """`modified`: separate discounts for counts of 1, 2 and 3 or more; `single`: one discount per order."""
    min_counts: list[int] = field(default_factory=lambda: [1])
    """Minimum count of an n-gram, per order; the last number applies to all higher orders."""
    prune: Annotated[float, Range(least=0)] = 0.0
    """Relative-entropy pruning (Stolcke, 1998): remove n-grams whose removal raises perplexity by less than this
    fraction. Common values are 1e-8 to 1e-6; 0 keeps all."""
    arpa: str | None = None
    """Read this ARPA file, plain or compressed, instead of counting. Words missing from it share the probability of
    `<unk>`; its n-grams with words missing from the data are dropped."""
    renormalize: bool = False
    """Recompute the back-offs of an ARPA file, so that probabilities sum to one over the data's vocabulary."""
    out: str | None = None
    """Write the model to this ARPA file; compressed if the name ends in .gz."""
    run_dir: str | None = None
    """Run directory; null creates one under runs/."""

    def problems(self) -> Iterator[str]:
        counts = self.min_counts
        if not counts or counts[0] != 1 or counts != sorted(counts) or len(counts) > self.order:
            yield (
                f"min_counts must start with 1, never decrease and have at most {self.order} numbers; got {counts}. "
                "Try min_counts=[1,1,2]."
            )
        if self.renormalize and self.arpa is None:
            yield "renormalize is for ARPA files, and arpa is null. Try renormalize=false."
        if self.features is not None:
            defaults = NgramConfig(self.data)
            for key in ("order", "discount", "min_counts", "prune", "arpa", "renormalize", "out"):
                if getattr(self, key) != getattr(defaults, key):
                    yield f"{key} is for Kneser-Ney n-grams; got features={self.features}. Try features=null."
