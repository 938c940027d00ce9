"""How much memory settings need, estimated from shapes alone.

The model is laid out on the meta device, so nothing is allocated; core and output layer say what they hold at once.
"""

import math
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from lm.config.schema import TrainConfig
from lm.data.text.vocabulary import Vocabulary
from lm.inference.scoring import CHUNK_STEPS, CHUNK_TOKENS
from lm.model.language_model import LanguageModel
from lm.optim.optimizer import build_optimizer
from lm.output.clusters.choice import head_size, shares_of
from lm.output.clusters.settings import ClusteredConfig
from lm.output.logits import most_logits
from lm.output.maxent import piece_logits
from lm.runs.assembly import build_model
from lm.system.memory import size_of
from lm.system.precision import Precision
from lm.training.checkpoint_writer import num_bytes

FLOAT = 4


@dataclass(frozen=True)
class Needs:
    """Bytes at the peak of a training step."""

    parameters: int
    """With their average, if there is one."""
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
    optimizer = build_optimizer(model, config.optim)
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
    activations = model.core.activations(tokens, training=True)
    activations += model.input.activations(step, num_distinct=_distinct_words(vocabulary, step))
    activations += 3 * tokens * model.core.width  # the output layer's input, its gradient, a copy of what the tails see
    copies = 1 if config.trainer.average is None else 2
    return Needs(
        parameters=copies * sum(p.numel() * p.element_size() for p in model.parameters()),
        gradients=gradients,
        optimizer=num_bytes(optimizer.state_dict()),
        activations=activations * FLOAT,
        logits=_logits(config, model, tokens=tokens, targets=step, training=True) * FLOAT,
    )


def scoring_needs(config: TrainConfig, vocabulary: Vocabulary) -> int:
    """Bytes that an evaluation needs besides the model."""
    tokens = max(CHUNK_STEPS * config.evaluate.batch_size, CHUNK_TOKENS)
    exact = laid_out(config, vocabulary)
    return FLOAT * (
        exact.core.activations(tokens, training=False)
        + _logits(config, exact, tokens=tokens, targets=len(vocabulary), training=False)
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


def _distinct_words(vocabulary: Vocabulary, num_tokens: int) -> int:
    """How many there are on average among so many tokens drawn in proportion to their counts."""
    unseen = num_tokens * np.log1p(-shares_of(vocabulary.counts).clip(max=0.5))
    return math.ceil(float(-np.expm1(unseen).sum()))


def _logits(config: TrainConfig, model: LanguageModel, *, tokens: int, targets: int, training: bool) -> int:
    """Numbers in the largest chunk of logits held at once, and in what is held beside it.

    An evaluation is always fused, and reads the weights where they are.
    """
    softmaxes, beside = model.output.softmaxes(tokens, targets), model.output.gathered(targets) if training else 0
    kind = _kind_of_device(config)
    if config.output.fused or not training:
        largest = max(most_logits(s.tokens, num_words=s.words, num_weights=s.weights, kind=kind) for s in softmaxes)
    else:  # logits, their log-softmax, their gradient
        largest = 3 * max(s.tokens * s.words for s in softmaxes)
    if (maxent := model.output.maxent) is not None:
        if config.output.fused or not training:  # scores, or the places of their gradients and a copy of these
            beside += (3 if training else 1) * min(largest, piece_logits(kind))
        else:  # places of all logits for every order, two numbers wide
            beside += 2 * maxent.order * largest // 3
    if config.trainer.precision is Precision.bf16:
        # Half as wide: the weights, the logits' gradient, and on a CPU the weights' gradient before it is added up.
        weights = max(s.weights for s in softmaxes)
        beside += largest // 2 + (weights if kind == "cpu" else weights // 2)
    return largest + beside


def _kind_of_device(config: TrainConfig) -> str:
    name = config.trainer.device
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else torch.device(name).type
