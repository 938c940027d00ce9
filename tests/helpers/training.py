"""Trainers without run directories, for testing single steps."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import nn

from lm.config.groups import find_plugin
from lm.config.schema import TrainConfig
from lm.data.batches import Batch, to_device
from lm.data.corpus import Corpus
from lm.model.language_model import build_model
from lm.optim.optimizers.adagrad import ACCUMULATOR_START, EPSILON
from lm.output.layers.adaptive import AdaptiveSoftmax
from lm.system.ranks import Ranks
from lm.system.tree import leaves
from lm.training.setup import training_streams
from lm.training.trainer import Trainer

LAYERS = [
    "output=full",
    "output=sampled",
    "output=hsm_freq",
    "output=adaptive output.cutoffs=[10,20]",
    "output=dsoftmax output.cutoffs=[10,20]",
    "output=dsoftmax_star output.cutoffs=[10,20]",
    "output=nce output.log_z=learned",
    "output=blackout",
    "output=self_normalized",
    "output=hsm_huffman",
]


def make_trainer(
    config: TrainConfig, corpus: Corpus, *, device: str = "cpu", num_batches: int = 6, ranks: Ranks | None = None
) -> tuple[Trainer, list[Batch]]:
    """Return a trainer with its first batches."""
    classes = find_plugin("output", config.output.name).target.word_classes(config.output, corpus)
    model = build_model(config, corpus.vocabulary, classes=classes).to(device)
    streams = training_streams(config, corpus)
    trainer = Trainer(model, streams=streams, config=config, ranks=ranks)
    return trainer, [to_device(trainer.batches().make(step), torch.device(device)) for step in range(num_batches)]


@contextmanager
def no_waiting_for_the_gpu() -> Iterator[None]:
    """Fail on any read from the device inside the context."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def losses_of(trainer: Trainer, batches: list[Batch]) -> list[float]:
    """Train on the batches; return each loss."""
    losses = []
    for batch in batches:
        before = trainer.loss_sum[0].item()
        trainer.step(batch)
        losses.append((trainer.loss_sum[0].item() - before) / batch.num_tokens)
    return losses


def assert_resume_is_identical(config: TrainConfig, corpus: Corpus, *, interrupted_at: int) -> None:
    """Compare twelve steps with a few, a checkpoint, fresh objects and the rest."""
    whole, batches = make_trainer(config, corpus, num_batches=12)
    losses_of(whole, batches)
    first, second = (make_trainer(config, corpus, num_batches=0)[0] for _ in range(2))
    losses_of(first, batches[:interrupted_at])
    second.load_state_dict(deepcopy(first.state_dict()))
    losses_of(second, batches[interrupted_at:])
    pairs = list(zip(leaves(second.state_dict()), leaves(whole.state_dict()), strict=True))
    tensors = [(ours, expected) for ours, expected in pairs if isinstance(ours, torch.Tensor)]
    assert len(tensors) > 5 and all(torch.equal(ours, expected) for ours, expected in tensors)


PLAIN = ["model.dropout=0", "optim.max_grad_norm=0.5", "trainer.bptt=7", "data.tokens=1000"]
"""Settings that `reference_losses` supports: epochs end in a short batch, and clipping is active."""


def reference_losses(config: TrainConfig, corpus: Corpus, batches: list[Batch]) -> list[float]:
    """Train a plain PyTorch model (nn.Embedding, nn.LSTM, clip_grad_norm_, Adagrad); return its losses."""
    source = build_model(config, corpus.vocabulary)
    embedding = nn.Embedding.from_pretrained(source.input.weight.detach().clone(), freeze=False)
    lstm = nn.LSTM(config.model.embedding_size, config.model.hidden_size)
    lstm.load_state_dict(source.core.layers[0].state_dict())
    if isinstance(source.output, AdaptiveSoftmax):
        output: nn.Module = source.output.to_torch()
    else:
        output = nn.Linear(config.model.hidden_size, len(corpus.vocabulary), bias=False)
        output.load_state_dict(source.output.state_dict())
    parameters = [*embedding.parameters(), *lstm.parameters(), *output.parameters()]
    optimizer = torch.optim.Adagrad(
        parameters,
        lr=config.optim.lr,
        weight_decay=config.optim.weight_decay,
        initial_accumulator_value=ACCUMULATOR_START,
        eps=EPSILON,
    )
    state = None
    losses = []
    for batch in batches:
        hidden, state = lstm(embedding(batch.inputs_TB), state)
        targets = batch.targets_TB.flatten()
        if isinstance(output, nn.AdaptiveLogSoftmaxWithLoss):
            loss = output(hidden.flatten(0, 1), targets).loss
        else:
            loss = nn.functional.cross_entropy(output(hidden).flatten(0, 1), targets)
        optimizer.zero_grad()
        objective = loss * len(batch.targets_TB) if config.optim.reduction == "stream" else loss
        objective.backward()
        nn.utils.clip_grad_norm_(parameters, config.optim.max_grad_norm or math.inf)
        optimizer.step()
        state = tuple(part.detach() for part in state)
        losses.append(loss.item())
    return losses
