"""Builds a model from settings."""

from typing import Any

import torch
from numpy.typing import NDArray

from lm.config.registry import find_plugin
from lm.config.schema import TrainConfig
from lm.data.corpus import Corpus
from lm.data.text.vocabulary import Vocabulary
from lm.model.base import InputSizes
from lm.model.language_model import LanguageModel
from lm.output.base import OutputLayer, build_output
from lm.output.maxent import MaxEnt
from lm.system.randomness import seed_for


def build_model(config: TrainConfig, vocabulary: Vocabulary, *, classes: NDArray[Any] | None = None) -> LanguageModel:
    """Build a freshly initialized model on torch's default device; the weights are determined by the seed.

    `classes` is the result of `word_classes`. It can be omitted if loaded weights provide the classes.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(config.seed, "weights"))
        output = build_output(config.output, width=config.model.width, counts=vocabulary.counts, classes=classes)
        sizes = InputSizes(
            config.model.embedding_size, vocabulary, output, sparse=config.optim.sparse_tables, tied=config.model.tie
        )
        input = find_plugin("input", config.input.name).target.build(config.input, sizes)
        core = find_plugin("model", config.model.name).target(config.model)
    maxent = None
    if config.model.maxent.order:
        maxent = MaxEnt(
            order=config.model.maxent.order,
            size=config.model.maxent.size,
            vocab_size=len(vocabulary),
            unk_id=vocabulary.unk_id,
            largest_softmax=max(output.softmax_sizes()),
        )
    return LanguageModel(input, core, output, maxent, settings=config.model)


def word_classes(config: TrainConfig, corpus: Corpus) -> NDArray[Any] | None:
    """Return the classes that the output layer learns from the training text; None for most layers."""
    layer: type[OutputLayer] = find_plugin("output", config.output.name).target
    return layer.word_classes(config.output, corpus)
