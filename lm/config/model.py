"""The model, its output layer, and the optimizer."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Annotated, Any

from lm.config.rules import Count, OptionalCount, Range


class EmbeddingUpdate(Enum):
    """How the optimizer treats the word embedding table; see `lm.optim.optimizer`."""

    sparse = "sparse"
    rowwise = "rowwise"
    dense = "dense"


class Schedule(Enum):
    """How the learning rate changes between epochs."""

    constant = "constant"
    halve_after_half = "halve_after_half"


@dataclass
class ModelConfig:
    """embedding -> dropout -> LSTM -> dropout; the output layer is a group of its own."""

    embedding_size: Count
    hidden_size: Count
    """LSTM cell width."""
    layers: Count
    projection: OptionalCount
    """Width of the LSTM's output where it is projected (LSTM-2048-512: 512); null for none."""
    dropout: Annotated[float, Range(least=0, below=1)]
    """On the embedding, between layers and on the LSTM's output."""

    def problems(self) -> Iterator[str]:
        if self.projection is not None and self.projection >= self.hidden_size:
            yield (
                f"model.projection must be below model.hidden_size ({self.hidden_size}); got {self.projection}. "
                "Try model.projection=null"
            )


@dataclass
class OutputConfig:
    """An output layer; see `lm.output`."""

    name: str
    """The variant, as in `output=full`."""
    fused: bool
    """Loss and gradient in one pass that never keeps the logits; false is plain autograd, the reference."""


@dataclass
class FullConfig(OutputConfig):
    """Exact softmax over the whole vocabulary."""


@dataclass
class SampledConfig(OutputConfig):
    """Softmax trained against a sample of the vocabulary, exact in evaluation."""

    sample_fraction: Annotated[float, Range(above=0)]
    """Draws per step, as a share of the vocabulary; the paper's is 0.2."""


@dataclass
class HierarchicalConfig(OutputConfig):
    """Two-level softmax over classes and the words of a class; `hsm_freq` and `hsm_sim` differ in the classes."""

    num_classes: OptionalCount
    """Number of classes; null for the square root of the vocabulary."""


class Objective(Enum):
    """What automatic clusters minimise; see `lm.output.clusters.choice`."""

    as_built = "as_built"
    paper = "paper"


@dataclass
class ClusteredConfig(OutputConfig):
    """Layers that cut the vocabulary, sorted by count, into a head and tails."""

    cutoffs: Any
    """Word ids at which the tails begin, increasing; `auto` chooses them by predicted time on this machine."""
    num_tails: Any
    """For `auto`: the number of tails, or `auto` for the fewest of 1 to 3 that come within 2 % of the fastest."""
    objective: Objective
    """For `auto`: the layer as it is built, or the paper's equal widths (for its figures)."""
    head_coverage: Annotated[float, Range(above=0, below=1)]
    """For `auto`: least share of the training tokens in the head; a smaller head is faster and predicts worse."""
    cost_model: str | None
    """For `auto`: null measures this machine once, `flops` counts operations instead, or the PATH of a saved model."""

    def problems(self) -> Iterator[str]:
        cutoffs, num_tails = self.cutoffs, self.num_tails
        listed = isinstance(cutoffs, list) and all(type(c) is int and c > 0 for c in cutoffs)
        if cutoffs != "auto" and not (listed and all(a < b for a, b in pairwise(cutoffs))):
            yield (
                f"output.cutoffs must be auto or a list of increasing positive word ids; got {cutoffs!r}. "
                "Try output.cutoffs=auto"
            )
        if num_tails != "auto" and not (type(num_tails) is int and num_tails >= 1):
            yield (
                f"output.num_tails must be auto or a number of tails from 1 on; got {num_tails!r}. "
                "Try output.num_tails=auto"
            )


@dataclass
class DSoftmaxConfig(ClusteredConfig):
    """One softmax over all words; clusters see disjoint slices of the hidden state."""


@dataclass
class DSoftmaxStarConfig(ClusteredConfig):
    """One softmax over all words; tails see narrow projections of the hidden state."""


@dataclass
class AdaptiveConfig(ClusteredConfig):
    """Adaptive softmax: frequent words in the root, the others in tails that are opened only when needed."""

    shortlist: bool
    """Keep the head's words in the root; false makes the head a leaf, which the paper says costs 5 to 10 %."""
    head_bias: bool
    """A trained bias on the root, as torch's module offers it; the paper has none."""


class Reduction(Enum):
    """The objective that a step differentiates; what is logged and reported is always the loss per token."""

    stream = "stream"
    """Summed over the steps of the batch, averaged over its streams: the paper's scale, at which its clip acts."""
    token = "token"
    """Averaged over both, as in the authors' code: `trainer.bptt` times smaller."""


@dataclass
class OptimConfig:
    """Adagrad with global-norm clipping."""

    lr: Annotated[float, Range(above=0)]
    schedule: Schedule
    reduction: Reduction
    """`stream` sums the loss over steps and averages it over streams; `token` averages over both."""
    max_grad_norm: Annotated[float | None, Range(above=0)]
    """Largest global norm of the gradient; null for none."""
    weight_decay: Annotated[float, Range(least=0)]
    """L2 decay, added to the gradient after clipping."""
    embedding_update: EmbeddingUpdate

    def problems(self) -> Iterator[str]:
        # Lazy decay multiplies an idle row by 1 - lr wd / sqrt(1e-5) a step, which must stay positive.
        if self.embedding_update is EmbeddingUpdate.sparse and self.lr * self.weight_decay >= 3e-3:
            too_large, usual = ("lr", 0.1) if self.lr > 1 else ("weight_decay", 1e-6)
            yield (
                "optim.lr times optim.weight_decay must be below 0.003 with optim.embedding_update=sparse; got "
                f"optim.lr={self.lr:g} and optim.weight_decay={self.weight_decay:g}. Try optim.{too_large}={usual:g}"
            )
