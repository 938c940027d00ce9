"""From settings to objects: the model, and a model with its vocabulary out of a checkpoint."""

from collections.abc import Callable
from pathlib import Path

import torch

from lm.config.schema import TrainConfig
from lm.data.batches import ShuffledShards, Streams
from lm.data.corpus import Corpus
from lm.output.clusters.choice import ClusterChoice, choose_clusters
from lm.output.clusters.settings import ClusteredConfig

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
