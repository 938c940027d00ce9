"""What the options of each group have in common; each plug-in declares its own settings beside its class."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated, Self

from lm.config.rules import Count, Range, Width

DEFAULT_ROOT = "data"
"""`data.root` as the shipped files set it."""


@dataclass
class DataConfig:
    """A corpus: where it comes from and how its text becomes words."""

    name: str
    """The corpus, as in `data=pydoc`."""
    root: str = DEFAULT_ROOT
    """Folder under which prepared corpora are kept, one folder each."""

    def problems(self) -> Iterator[str]:
        if not self.root:
            yield f"data.root must name a folder; got nothing. Try data.root={DEFAULT_ROOT}"

    @property
    def shuffles_shards(self) -> bool:
        """Whether each epoch reads the training shards in a new order."""
        return False


class EncodingErrors(Enum):
    """What to do with invalid bytes."""

    strict = "strict"
    replace = "replace"

    @property
    def tag(self) -> str:
        """Suffix of the prepared corpus's folder."""
        return "" if self is EncodingErrors.strict else f"-{self.value}"


@dataclass
class MaxEntConfig:
    """Weights of n-grams, added to the scores of words and classes and trained with the network."""

    order: Annotated[int | None, Range(least=0, most=9)] = None
    """Words of the longest n-grams; null or 0 for none."""
    size: Annotated[int, Range(least=1, most=1e11)] = 1 << 22
    """Weights that all n-grams share by hashing."""


@dataclass
class ModelConfig:
    """A core (`model=lstm`): what turns embedded words into hidden states."""

    name: str
    """The core, as in `model=lstm`."""
    embedding_size: Width = 256
    """Width of the word vectors that the input hands to the core."""
    hidden_size: Width = 512
    """Width of the core's cells."""
    dropout: Annotated[float, Range(least=0, below=1)] = 0.0
    """On the embedding, between layers and on the core's output."""
    tie: bool = False
    """The input reads the word vectors of the output layer: `table` with `full`, `adaptive` with `adaptive`."""
    maxent: MaxEntConfig = field(default_factory=MaxEntConfig)

    @property
    def width(self) -> int:
        """Of the hidden states that the output layer sees."""
        return self.hidden_size

    def resized(self, *, hidden_size: int, embedding_size: int) -> Self:
        """The same core with other widths."""
        return replace(self, hidden_size=hidden_size, embedding_size=embedding_size)


@dataclass
class InputConfig:
    """What turns words into vectors (`input=table`)."""

    name: str
    """The input, as in `input=table`."""

    tied_with = ""
    """The output layer whose word vectors this input can read (`model.tie`), if any."""

    def problems_beside(self, output: "OutputConfig", *, tied: bool) -> Iterator[str]:
        """What keeps this input and that output layer from being parts of one model."""
        if tied and output.name != self.tied_with:
            yield (
                "model.tie=true needs input=table with output=full, or input=adaptive with output=adaptive; got "
                f"input={self.name} with output={output.name}. Try model.tie=false"
            )


@dataclass
class OutputConfig:
    """What turns hidden states into a distribution over words (`output=adaptive`)."""

    name: str
    """The layer, as in `output=adaptive`."""
    fused: bool = True
    """Loss and gradient in one pass that never keeps the logits; false is plain autograd, the reference."""

    supports_maxent = False
    """Whether n-gram weights (`model.maxent`) can be added to the layer's scores."""


class Schedule(Enum):
    """How the learning rate changes in the course of a run; see `lm.optim.schedule`."""

    constant = "constant"
    halve_after_half = "halve_after_half"
    linear = "linear"
    cosine = "cosine"
    plateau = "plateau"

    @property
    def counted_from(self) -> tuple[str, ...]:
        """The limits of the run, keys of `trainer`, on which the rate depends."""
        return {
            Schedule.halve_after_half: ("max_epochs",),
            Schedule.linear: LIMITS,
            Schedule.cosine: LIMITS,
        }.get(self, ())


LIMITS = ("max_epochs", "max_steps", "max_tokens", "max_seconds")
"""The settings of `trainer` of which the first one reached ends a run."""


class Reduction(Enum):
    """The objective that a step differentiates; what is logged and reported is always the loss per token."""

    stream = "stream"
    """Summed over the steps of the batch, averaged over its streams: the paper's scale, at which its clip acts."""
    token = "token"
    """Averaged over both, as in the authors' code: `trainer.bptt` times smaller."""


class EmbeddingUpdate(Enum):
    """How the word embedding is updated."""

    sparse = "sparse"
    """The batch's rows, each element as in a dense parameter."""
    rowwise = "rowwise"
    """The batch's rows, with one statistic of the gradients' squares per word."""
    dense = "dense"
    """The whole table, as an ordinary parameter."""


@dataclass
class OptimConfig:
    """An optimizer (`optim=adagrad`)."""

    name: str
    """The optimizer, as in `optim=adagrad`."""
    lr: Annotated[float, Range(above=0)] = 0.1
    """Learning rate."""
    schedule: Schedule = Schedule.constant
    """`constant`, `linear` and `cosine` to zero at the run's limit, `plateau` by validation, `halve_after_half`."""
    warmup_steps: Annotated[int, Range(least=0)] = 0
    """First steps, over which the rate rises in proportion to the step; with any schedule."""
    plateau_factor: Annotated[float, Range(above=0, below=1)] = 0.5
    """What `plateau` multiplies the rate by."""
    plateau_patience: Count = 1
    """Evaluations in a row without a better perplexity after which `plateau` does so."""
    reduction: Reduction = Reduction.stream
    """`stream` sums the loss over steps and averages it over streams; `token` averages over both."""
    max_grad_norm: Annotated[float | None, Range(above=0)] = 1.0
    """Largest global norm of the gradient; null does not clip."""
    embedding: EmbeddingUpdate = EmbeddingUpdate.sparse
    """`sparse` and `rowwise` update the batch's rows, `rowwise` with one second moment per word; `dense` updates all.

    With Adagrad, `rowwise` is neither clipped nor decayed, as in the released code.
    """

    @property
    def sparse_tables(self) -> bool:
        """Whether the word table's gradient is kept for a batch's rows only."""
        return self.embedding is not EmbeddingUpdate.dense
