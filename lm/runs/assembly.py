"""From settings to objects: the model, and a model with its vocabulary out of a checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lm.config.registry import find_plugin
from lm.config.schema import TrainConfig
from lm.config.validate import make_config
from lm.data.batches import ShuffledShards, Streams
from lm.data.corpus import Corpus
from lm.data.text.subwords import open_vocabulary
from lm.data.text.vocabulary import Vocabulary
from lm.model.build import build_model
from lm.model.language_model import LanguageModel
from lm.output.clusters.choice import ClusterChoice, choose_clusters
from lm.output.clusters.settings import ClusteredConfig
from lm.system import checkpoint
from lm.system.errors import UserError
from lm.training.averaging import use_average

SHARED_CELLS = 1 << 18
"""Below this many cells a step (tokens times width) two threads wait for each other longer than they compute."""


def training_streams(config: TrainConfig, corpus: Corpus) -> Streams:
    """The training text as the streams of a batch, its shards in the order of the settings."""
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
    groups, streams = config.trainer.micro_batches, config.trainer.batch_size
    length = min(config.trainer.bptt, len(corpus.split("train")) // streams)  # a stream may be shorter than asked for
    choice = choose_clusters(
        config.output,
        counts=corpus.vocabulary.counts,
        width=config.model.width,
        tokens=max(1, streams * length // groups),
        device=device,
        precision=config.trainer.precision,
        cache_dir=Path(config.data.root) / "cost-models",
        notice=notice,
    )
    return choice.repeated(groups)


def pick_threads(config: TrainConfig, *, num_ranks: int = 1) -> int:
    """The CPU threads of `trainer.threads`; null is all cores, or one if a step is too small to gain from more."""
    if config.trainer.threads is not None:
        return config.trainer.threads
    streams = config.trainer.batch_size // num_ranks // config.trainer.micro_batches
    cells = streams * config.trainer.bptt * config.model.hidden_size
    return torch.get_num_threads() if cells >= SHARED_CELLS else 1


def restore(
    content: dict[str, Any], *, path: Path, device: torch.device
) -> tuple[LanguageModel, Vocabulary, TrainConfig]:
    """The model a checkpoint's content describes, with pending decay applied, or the average of its weights."""
    with checkpoint.explain_damage(path):
        config = make_config(content["config"], TrainConfig)
        vocabulary = unpack_vocabulary(content)
        with torch.device("meta"):
            checkpoint.check_shapes(content["model"], build_model(config, vocabulary), path=path)
        model = build_model(config, vocabulary)
        model.load_state_dict(content["model"])
        find_plugin("optim", config.optim.name).target.finish_weights(model, content["optimizer"], config.optim)
        use_average(model, content.get("average"))
    return model.to(device), vocabulary, config


def pack_vocabulary(vocabulary: Vocabulary) -> dict[str, Any]:
    """As a checkpoint holds it: its files as bytes in tensors, and its hash."""
    files = {name: torch.from_numpy(np.frombuffer(data, np.uint8).copy()) for name, data in vocabulary.files().items()}
    return {"hash": vocabulary.hash, "files": files}


def unpack_vocabulary(content: dict[str, Any]) -> Vocabulary:
    packed = content["vocabulary"]
    vocabulary = open_vocabulary({name: data.numpy().tobytes() for name, data in packed["files"].items()})
    if vocabulary.hash != packed["hash"]:
        raise UserError("The vocabulary in the checkpoint is not the one that was saved: bytes of it have changed.")
    return vocabulary
