"""From settings to objects: the model, and a model with its vocabulary out of a checkpoint."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lm.config.commands import TrainConfig
from lm.config.model import ClusteredConfig, EmbeddingUpdate, HierarchicalConfig
from lm.config.validate import make_config
from lm.data.batches import ShuffledShards, Streams
from lm.data.brown import brown_classes
from lm.data.corpus import Corpus
from lm.data.text.subwords import open_vocabulary
from lm.data.text.vocabulary import Vocabulary
from lm.model.language_model import LanguageModel
from lm.optim.optimizer import pending_decay
from lm.output import build_output
from lm.output.clusters.choice import ClusterChoice, choose_clusters
from lm.output.layers.hsm import default_num_classes
from lm.system.devices import pick_device
from lm.system.randomness import seed_for
from lm.training import checkpoint

SHARED_CELLS = 1 << 18
"""Below so many LSTM cells a step (tokens times width) two threads wait for each other longer than they compute."""


def build_model(config: TrainConfig, vocabulary: Vocabulary, *, classes: NDArray[Any] | None = None) -> LanguageModel:
    """A freshly initialised model on torch's current default device; the same weights for the same seed.

    `classes` are needed to train `output=hsm_sim`; a model that weights are loaded into gets them from there.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(config.seed, "weights"))
        width = config.model.projection or config.model.hidden_size
        output = build_output(config.output, width=width, counts=vocabulary.counts, classes=classes)
        return LanguageModel(
            config.model,
            vocab_size=len(vocabulary),
            output=output,
            embedding_by_rows=config.optim.embedding_update is not EmbeddingUpdate.dense,
        )


def training_streams(config: TrainConfig, corpus: Corpus) -> Streams:
    """The training text as the streams of a batch, its shards in the order that the settings ask for."""
    shards = None
    if config.data.shuffles_shards:
        shards = ShuffledShards(corpus.shard_ends("train"), seed=config.seed)
    return Streams(
        corpus.split("train"),
        batch_size=config.trainer.batch_size,
        bptt=config.trainer.bptt,
        eos_id=corpus.vocabulary.eos_id,
        shards=shards,
    )


def automatic_clusters(
    config: TrainConfig, corpus: Corpus, *, device: torch.device, notice: Callable[[str], None]
) -> ClusterChoice:
    """The clusters of `output.cutoffs=auto`; cost models are kept beside the corpora."""
    assert isinstance(config.output, ClusteredConfig)
    groups = config.trainer.micro_batches
    choice = choose_clusters(
        config.output,
        counts=corpus.vocabulary.counts,
        width=config.model.projection or config.model.hidden_size,
        tokens=max(1, config.trainer.batch_size * config.trainer.bptt // groups),
        device=device,
        precision=config.trainer.precision,
        cache_dir=Path(config.data.root) / "cost-models",
        notice=notice,
    )
    return choice.repeated(groups)


def word_classes(config: TrainConfig, corpus: Corpus, *, notice: Callable[[str], None]) -> NDArray[Any] | None:
    """The Brown classes that `output=hsm_sim` trains with, found once and kept beside the corpus; else None."""
    if not (isinstance(config.output, HierarchicalConfig) and config.output.name == "hsm_sim"):
        return None
    return brown_classes(
        corpus.split("train"),
        vocab_size=len(corpus.vocabulary),
        num_classes=config.output.num_classes or default_num_classes(len(corpus.vocabulary)),
        cache_dir=corpus.path,
        corpus_hash=corpus.meta["splits"]["train"]["sha256"],
        notice=notice,
    )


def pick_threads(config: TrainConfig, *, num_ranks: int = 1) -> int:
    """The CPU threads of `trainer.threads`; null is all cores, but one where a step is too small to be shared out."""
    if config.trainer.threads is not None:
        return config.trainer.threads
    streams = config.trainer.batch_size // num_ranks // config.trainer.micro_batches
    cells = streams * config.trainer.bptt * config.model.hidden_size
    return torch.get_num_threads() if cells >= SHARED_CELLS else 1


def load(path: str | os.PathLike[str], *, device: str = "cpu") -> tuple[LanguageModel, Vocabulary]:
    """The trained model and its vocabulary, from a run directory or a checkpoint file; ready for inference.

    >>> model, vocabulary = lm.load("runs/NAME")
    """
    model, vocabulary, _ = open_checkpoint(os.fspath(path), device=device)
    return model, vocabulary


def open_checkpoint(path: str, *, device: str) -> tuple[LanguageModel, Vocabulary, TrainConfig]:
    """What a run directory or a checkpoint file holds, ready for inference: model, vocabulary, the run's settings."""
    file = checkpoint.find(path)
    model, vocabulary, config = restore(checkpoint.load(file), path=file, device=pick_device(device, key="device"))
    return model.eval(), vocabulary, config


def restore(
    content: dict[str, Any], *, path: Path, device: torch.device
) -> tuple[LanguageModel, Vocabulary, TrainConfig]:
    """The model a checkpoint's content describes, with the true weights: decay that idle rows are owed is applied."""
    with checkpoint.explain_damage(path):
        config = make_config(content["config"], TrainConfig)
        vocabulary = unpack_vocabulary(content)
        with torch.device("meta"):
            checkpoint.check_shapes(content["model"], build_model(config, vocabulary), path=path)
        model = build_model(config, vocabulary)
        model.load_state_dict(content["model"])
        _settle(model, content["optimizer"], config)
    return model.to(device), vocabulary, config


@torch.no_grad()
def _settle(model: LanguageModel, state: dict[str, Any], config: TrainConfig) -> None:
    """A run that was stopped between evaluations saves rows that are still owed decay."""
    for name, table in state["tables"].items():
        if "settled" in table:
            weight = model.get_parameter(f"{name}.weight")
            idle_V = state["step"] - table["settled"]
            decay = pending_decay(table["accumulator"], idle_V, rate=state["lr"] * config.optim.weight_decay)
            weight.mul_(decay.to(weight.device))


def pack_vocabulary(vocabulary: Vocabulary) -> dict[str, Any]:
    """As a checkpoint holds it: its files as bytes in tensors, and its hash."""
    files = {name: torch.from_numpy(np.frombuffer(data, np.uint8).copy()) for name, data in vocabulary.files().items()}
    return {"hash": vocabulary.hash, "files": files}


def unpack_vocabulary(content: dict[str, Any]) -> Vocabulary:
    files = content["vocabulary"]["files"]
    return open_vocabulary({name: data.numpy().tobytes() for name, data in files.items()})
