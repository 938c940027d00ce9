"""Derive parts of a run from its settings: streams, threads, automatic clusters."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch

from lm.config.schema import TrainConfig
from lm.config.validate import flatten
from lm.data.batches import Lines, ShuffledShards, Streams, TrainingText
from lm.data.corpus import Corpus
from lm.output.clusters.choice import ClusterChoice, choose_clusters
from lm.output.clusters.partition import ClusteredConfig
from lm.system.devices import prepare_cpu, using_threads
from lm.system.errors import UserError
from lm.system.ranks import Ranks

SHARED_CELLS = 1 << 18
"""Smaller steps (tokens times hidden size) are faster on one thread than on several."""


def check_ranks(config: TrainConfig, ranks: Ranks) -> None:
    """Raise UserError unless all ranks have the same settings."""
    if ranks.size > 1 and config.trainer.dry_run:
        raise UserError("trainer.dry_run=true needs a single process; got torchrun. Leave torchrun out.")
    if differing := ranks.differing(flatten(asdict(config))):
        raise UserError(
            f"All ranks must be started with the same settings; these differ: {', '.join(differing)}. "
            "Give every node the same command."
        )


def training_streams(config: TrainConfig, corpus: Corpus) -> TrainingText:
    """Cut the training text into streams, with shards in the configured order, or into lines."""
    tokens, eos_id, trainer = corpus.split("train"), corpus.vocabulary.eos_id, config.trainer
    if config.data.sequences == "lines":
        return Lines(tokens, batch_size=trainer.batch_size, bptt=trainer.bptt, eos_id=eos_id, seed=config.seed)
    shards = None
    if config.data.shuffles_shards:
        shards = ShuffledShards(corpus.shard_ends("train"), seed=config.seed)
    return Streams(
        tokens,
        batch_size=trainer.batch_size,
        bptt=trainer.bptt,
        eos_id=eos_id,
        shards=shards,
        length_seed=config.seed if trainer.random_bptt else None,
    )


@contextmanager
def set_threads(config: TrainConfig, *, num_ranks: int) -> Iterator[int]:
    """Set the number of CPU threads for training inside the context; yield the number for evaluations."""
    available = torch.get_num_threads()
    with using_threads(available):  # restored for the next run of this process
        prepare_cpu(pick_threads(config, num_ranks=num_ranks))
        yield config.trainer.threads or available


def pick_threads(config: TrainConfig, *, num_ranks: int = 1) -> int:
    """Resolve `trainer.threads`; null means all cores, or one thread if steps are too small to benefit from more."""
    if config.trainer.threads is not None:
        return config.trainer.threads
    streams = config.trainer.batch_size // num_ranks // config.trainer.micro_batches
    cells = streams * config.trainer.bptt * config.model.hidden_size
    return torch.get_num_threads() if cells >= SHARED_CELLS else 1


def resolve_cutoffs(
    config: TrainConfig, corpus: Corpus, *, device: torch.device, ranks: Ranks
) -> tuple[TrainConfig, ClusterChoice | None]:
    """Replace `output.cutoffs=auto` by word ids; also return how they were chosen.

    Rank 0 measures the whole batch, so that the model does not depend on the number of ranks.
    """
    if not isinstance(config.output, ClusteredConfig) or config.output.cutoffs != "auto":
        return config, None
    choice = ranks.from_rank0(lambda: automatic_clusters(config, corpus, device=device))
    return replace(config, output=replace(config.output, cutoffs=choice.cutoffs)), choice


def automatic_clusters(config: TrainConfig, corpus: Corpus, *, device: torch.device) -> ClusterChoice:
    """Choose clusters for `output.cutoffs=auto`; cost models are cached next to the corpora."""
    assert isinstance(config.output, ClusteredConfig)
    groups, streams = config.trainer.micro_batches, config.trainer.batch_size
    length = min(config.trainer.bptt, len(corpus.split("train")) // streams)  # a stream may be shorter than bptt
    choice = choose_clusters(
        config.output,
        counts=corpus.vocabulary.counts,
        width=config.model.width,
        tokens=max(1, streams * length // groups),
        device=device,
        precision=config.trainer.precision,
        cache_dir=Path(config.data.root) / "cost-models",
    )
    return choice.repeated(groups)
