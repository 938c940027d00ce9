"""How much memory settings need, estimated from shapes alone.

The model is laid out on the meta device, so that nothing is allocated. The factors of the LSTM's activations were
counted on real steps; the whole is good to about a fourth.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from lm.config.commands import TrainConfig
from lm.config.model import ClusteredConfig
from lm.data.text.vocabulary import Vocabulary
from lm.inference.scoring import CHUNK_STEPS, CHUNK_TOKENS
from lm.model.language_model import LanguageModel
from lm.optim.optimizer import Optimizer
from lm.output import AdaptiveSoftmax, HierarchicalSoftmax, SampledSoftmax
from lm.output.clusters.choice import head_size, shares_of
from lm.output.fused import most_logits
from lm.runs.assembly import build_model
from lm.system.memory import size_of
from lm.system.precision import Precision

FLOAT = 4
UNITS_PER_INPUT, UNITS_PER_CELL, WEIGHT_COPIES = 5, 14, 1
"""Numbers that an LSTM layer holds per token for each of its inputs and cells, and copies it makes of its weights."""


@dataclass(frozen=True)
class Needs:
    """Bytes at the peak of a training step."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """Of one group of streams: embedding and LSTM, forward and backward."""
    logits: int
    """As many as the output layer holds at once."""

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {size_of(getattr(self, field.name))}" for field in fields(self))


def training_needs(config: TrainConfig, vocabulary: Vocabulary, *, num_ranks: int = 1) -> Needs:
    """Of one rank's training step with these settings; automatic clusters, not chosen yet, are taken to be one tail."""
    model = laid_out(config, vocabulary)
    optimizer = Optimizer(model, config.optim)
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = sum(p.numel() for p in trained) * FLOAT
    groups = config.trainer.micro_batches
    if groups > 1 or num_ranks > 1:  # the output layer's gradient, before it is added to other groups' or exchanged
        gradients += sum(p.numel() for p in model.output.parameters() if p.requires_grad) * FLOAT
    batch_size = config.trainer.batch_size // num_ranks
    streams = -(-batch_size // groups)
    # A stream may be shorter than the steps asked for.
    length = max(1, min(config.trainer.bptt, int(vocabulary.counts.sum()) // config.trainer.batch_size))
    tokens, step = length * streams, length * batch_size
    activations = _lstm_units(config, tokens=tokens, training=True) + 2 * step * config.model.embedding_size
    return Needs(
        parameters=sum(p.numel() * p.element_size() for p in model.parameters()),
        gradients=gradients,
        optimizer=_bytes_in(optimizer.state_dict()),
        activations=activations * FLOAT,
        logits=_logits(config, model, tokens=tokens, targets=step) * FLOAT,
    )


def scoring_needs(config: TrainConfig, vocabulary: Vocabulary) -> int:
    """Bytes that an evaluation needs besides the model."""
    tokens = max(CHUNK_STEPS * config.evaluate.batch_size, CHUNK_TOKENS)
    exact = laid_out(config, vocabulary)
    return FLOAT * (
        _lstm_units(config, tokens=tokens, training=False)
        + _logits(config, exact, tokens=tokens, targets=len(vocabulary), fused=True)
    )


def laid_out(config: TrainConfig, vocabulary: Vocabulary) -> LanguageModel:
    """The model's shapes."""
    output = config.output
    if isinstance(output, ClusteredConfig) and output.cutoffs == "auto":
        head = head_size(shares_of(vocabulary.counts), coverage=output.head_coverage)
        cutoffs = [head] if head < len(vocabulary) else []
        config = replace(config, output=replace(output, cutoffs=cutoffs))
    with torch.device("meta"):
        return build_model(config, vocabulary)


def _lstm_units(config: TrainConfig, *, tokens: int, training: bool) -> int:
    """Numbers held by embedding and LSTM for so many tokens."""
    model = config.model
    width = model.projection or model.hidden_size
    inputs = [model.embedding_size] + [width] * (model.layers - 1)
    if not training:
        return tokens * (UNITS_PER_INPUT * max(inputs) + UNITS_PER_CELL * model.hidden_size)
    units = tokens * sum(UNITS_PER_INPUT * size + UNITS_PER_CELL * model.hidden_size for size in inputs)
    units += tokens * 3 * width  # the output layer's input, its gradient, and a copy of what the tails see
    if model.dropout:
        units += tokens * 2 * (model.embedding_size + width * model.layers)
    weights = 4 * model.hidden_size * sum(size + width for size in inputs)
    return units + WEIGHT_COPIES * weights


def _logits(config: TrainConfig, model: LanguageModel, *, tokens: int, targets: int, fused: bool | None = None) -> int:
    """Numbers in the largest piece of logits held at once, and in what stands beside it."""
    output = model.output
    beside = 0
    blocks = [Softmax(tokens, output.vocab_size, sum(p.numel() for p in output.parameters()))]
    if isinstance(output, SampledSoftmax):
        words = min(output.vocab_size, output.num_samples + targets)
        blocks = [Softmax(tokens, words, words * output.width)]
        beside = 2 * words * output.width  # the rows, and their gradient
    elif isinstance(output, AdaptiveSoftmax):
        shares = output.describe()["coverage"][-len(output.clusters) :] if output.clusters else []
        tails = zip(output.clusters, shares, strict=True)
        blocks = [Softmax(tokens, len(output.head), output.head.numel())]
        blocks += [Softmax(max(1, int(tokens * share)), len(weight), weight.numel()) for weight, share in tails]
    elif isinstance(output, HierarchicalSoftmax):
        sizes = [len(output.classes), *output.cluster_sizes]
        blocks = [Softmax(tokens, size, size * output.width) for size in sizes]
    if config.output.fused if fused is None else fused:
        largest = max(most_logits(b.tokens, num_words=b.words, num_weights=b.weights) for b in blocks)
    else:  # logits, their log-softmax, their gradient
        largest = 3 * max(b.tokens * b.words for b in blocks)
    if config.trainer.precision is Precision.bf16:
        beside += max(b.weights for b in blocks) // 2 + largest // 2
    return largest + beside


class Softmax(NamedTuple):
    """One softmax of the output layer."""

    tokens: int
    words: int
    weights: int


def _bytes_in(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    return sum(map(_bytes_in, state.values())) if isinstance(state, dict) else 0
