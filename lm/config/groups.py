"""Base settings of each group; a plug-in adds its own beside its class."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, Self

from lm.config.rules import Count, OptionalRate, Penalty, Range, Rate, Width

SPLITS = ("train", "valid", "test")
DEFAULT_ROOT = "data"
"""Default of `data.root`."""
LIMITS = ("max_epochs", "max_steps", "max_tokens", "max_seconds")
"""Keys of `trainer` that limit a run."""
DEPENDS_ON = {"halve_after_half": ("max_epochs",), "linear": LIMITS, "cosine": LIMITS}
"""By `optim.schedule`, the limits of the run that its learning rate depends on."""
EncodingErrors = Literal["strict", "replace"]
Schedule = Literal["constant", "halve_after_half", "linear", "cosine", "plateau"]


@dataclass
class DataConfig:
    """A corpus: its source and its tokenization."""

    name: str
    """The corpus, as in `data=pydoc`."""
    root: str = DEFAULT_ROOT
    """Folder for downloaded and prepared corpora."""
    sequences: Literal["stream", "lines"] = field(default="stream", kw_only=True)
    """`stream`: one continuous text; `lines`: shuffled lines, each from a zero state, also in evaluations."""


@dataclass
class MaxEntConfig:
    """MaxEnt features: hashed n-gram weights, added to the logits and trained with the network."""

    order: Annotated[int | None, Range(least=0, most=9)] = None
    """Order of the longest n-grams; null or 0 for none."""
    size: Annotated[int, Range(least=1, most=1e11)] = 1 << 22
    """Number of weights, shared by all n-grams through hashing."""


@dataclass
class ModelConfig:
    """A core (`model=lstm`), which turns embedded words into hidden states."""

    name: str
    """The core, as in `model=lstm`."""
    embedding_size: Width = 256
    """Width of the word embeddings."""
    hidden_size: Width = 512
    """Width of the core."""
    dropout: Rate = 0.0
    """Dropout rate on embeddings, between layers and on the core's output."""
    input_dropout: OptionalRate = None
    """Dropout rate on embeddings; null for model.dropout."""
    output_dropout: OptionalRate = None
    """Dropout rate on the core's output; null for model.dropout."""
    locked_dropout: bool = False
    """Use the same dropout masks for all steps of a batch (variational dropout)."""
    word_dropout: Rate = 0.0
    """Probability of zeroing all occurrences of a word in a batch."""
    activation_penalty: Penalty = 0.0
    """AR: weight of the mean square of the hidden states in the training loss (AWD-LSTM: 2)."""
    change_penalty: Penalty = 0.0
    """TAR: weight of the mean square of their change from step to step (AWD-LSTM: 1)."""
    tie: bool = False
    """Tie input and output embeddings: input=table with output=full, input=adaptive with output=adaptive."""
    maxent: MaxEntConfig = field(default_factory=MaxEntConfig)

    @property
    def width(self) -> int:
        """Width of the hidden states that the output layer receives."""
        return self.hidden_size

    def rate(self, dropout: float | None) -> float:
        """Resolve an optional dropout rate."""
        return self.dropout if dropout is None else dropout

    def resized(self, *, hidden_size: int, embedding_size: int) -> Self:
        """Return the same core with other widths."""
        return replace(self, hidden_size=hidden_size, embedding_size=embedding_size)


@dataclass
class InputConfig:
    """An input (`input=table`), which turns words into vectors."""

    name: str
    """The input, as in `input=table`."""

    tied_with = ""
    """The output layer whose embeddings this input can share (`model.tie`), if any."""

    def check_compatible(self, output: "OutputConfig", *, tied: bool) -> Iterator[str]:
        """Explain why this input and output layer cannot be combined."""
        if tied and output.name != self.tied_with:
            yield (
                "model.tie=true needs input=table with output=full, or input=adaptive with output=adaptive; got "
                f"input={self.name} with output={output.name}. Try model.tie=false."
            )


@dataclass
class OutputConfig:
    """An output layer (`output=adaptive`), which turns hidden states into a distribution over words."""

    name: str
    """The layer, as in `output=adaptive`."""

    supports_maxent = False
    """Whether `model.maxent` can be added to the layer's logits."""


@dataclass
class OptimConfig:
    """An optimizer (`optim=adagrad`)."""

    name: str
    """The optimizer, as in `optim=adagrad`."""
    lr: Annotated[float, Range(above=0)] = 0.1
    """Learning rate."""
    schedule: Schedule = "constant"
    """constant; linear or cosine decay to zero at the run's limit; plateau (by validation); halve_after_half."""
    warmup_steps: Annotated[int, Range(least=0)] = 0
    """Steps of linear warm-up, with any schedule."""
    plateau_factor: Annotated[float, Range(above=0, below=1)] = 0.5
    """Factor by which `plateau` multiplies the learning rate."""
    plateau_patience: Count = 1
    """Evaluations in a row without a better perplexity before `plateau` lowers the learning rate."""
    reduction: Literal["stream", "token"] = "stream"
    """Loss of a step: `stream` sums over steps and averages over streams; `token` averages over both."""
    max_grad_norm: Annotated[float | None, Range(above=0)] = 1.0
    """Clip the global gradient norm to this value; null disables clipping."""
    embedding: Literal["sparse", "rowwise", "dense"] = "sparse"
    """`sparse` and `rowwise` update the batch's rows, `rowwise` with one second moment per word; `dense` updates all.

    With Adagrad, `rowwise` is neither clipped nor decayed, as in the released code.
    """
