"""Derive parts of a run from its settings (streams, threads, automatic clusters); resume a run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import OmegaConf

from lm.config.groups import DEPENDS_ON
from lm.config.schema import TrainConfig
from lm.config.validate import changed_keys, flatten, make_config
from lm.data.batches import Lines, Streams, TrainingText
from lm.data.corpus import Corpus
from lm.data.source import SPLITS
from lm.output.clusters.choice import ClusterChoice, choose_clusters
from lm.output.clusters.partition import ClusteredConfig
from lm.system import checkpoint
from lm.system.devices import prepare_cpu, using_threads
from lm.system.errors import UserError
from lm.system.ranks import Ranks
from lm.training.metrics import read_metrics
from lm.training.run_dir import Start
from lm.training.trainer import Trainer

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
    """Cut the training text into streams or lines."""
    tokens, eos_id, trainer = corpus.split("train"), corpus.vocabulary.eos_id, config.trainer
    if config.data.sequences == "lines":
        return Lines(tokens, batch_size=trainer.batch_size, bptt=trainer.bptt, eos_id=eos_id, seed=config.seed)
    return Streams(
        tokens,
        batch_size=trainer.batch_size,
        bptt=trainer.bptt,
        eos_id=eos_id,
        length_seed=config.seed if trainer.random_bptt else None,
    )


@contextmanager
def set_threads(config: TrainConfig, *, num_ranks: int) -> Iterator[int]:
    """Set the number of CPU threads for training inside the context; yield the number for evaluations.

    `trainer.threads=null` means all cores, or one thread for training if its steps are too small to benefit from more.
    """
    available = torch.get_num_threads()
    streams = config.trainer.batch_size // num_ranks // config.trainer.micro_batches
    cells = streams * config.trainer.bptt * config.model.hidden_size
    with using_threads(available):  # restored for the next run of this process
        prepare_cpu(config.trainer.threads or (available if cells >= SHARED_CELLS else 1))
        yield config.trainer.threads or available


def resolve_cutoffs(
    config: TrainConfig, corpus: Corpus, *, device: torch.device, ranks: Ranks
) -> tuple[TrainConfig, ClusterChoice | None]:
    """Replace `output.cutoffs=auto` by word ids; also return how they were chosen.

    Rank 0 measures the whole batch, so that the model does not depend on the number of ranks. Cost models are cached
    next to the corpora.
    """
    output, trainer = config.output, config.trainer
    if not isinstance(output, ClusteredConfig) or output.cutoffs != "auto":
        return config, None
    groups, streams = trainer.micro_batches, trainer.batch_size
    length = min(trainer.bptt, len(corpus.split("train")) // streams)  # a stream may be shorter than bptt
    choose = partial(
        choose_clusters,
        output,
        counts=corpus.vocabulary.counts,
        width=config.model.width,
        tokens=max(1, streams * length // groups),
        device=device,
        precision=trainer.precision,
        cache_dir=Path(config.data.root) / "cost-models",
    )
    choice = ranks.from_rank0(choose).repeated(groups)
    return replace(config, output=replace(output, cutoffs=choice.cutoffs)), choice


def after_restart(config: TrainConfig) -> TrainConfig:
    """Return settings with which a restart by torchrun resumes the run instead of starting another."""
    if not int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        return config
    if config.resume in (None, "auto"):
        return replace(config, resume="auto")
    return replace(config, resume=str(checkpoint.find(config.resume).parent.parent))  # last.pt is newer


def resumed_config(
    config: TrainConfig, saved: dict[str, Any], *, file: Path, overrides: list[str]
) -> tuple[TrainConfig, ClusterChoice | None]:
    """Merge a resumed run's settings with permitted overrides; also return how its cutoffs were chosen."""
    with checkpoint.explain_damage(file):
        old, new = saved["config"], asdict(config)
        if new["output"].get("cutoffs") == "auto":
            new["output"]["cutoffs"] = old["output"].get("cutoffs")  # chosen when the run started
        if config.resume != "auto":
            given = [override.lstrip("+~").partition("=")[0] for override in overrides]
            if "experiment" not in given:
                merged = OmegaConf.create(old)
                for key, value in flatten(new).items():
                    if key in ("run_dir", "resume") or any(key == n or key.startswith(f"{n}.") for n in given):
                        OmegaConf.update(merged, key, value)
                new = cast("dict[str, Any]", OmegaConf.to_container(merged))
        differing = list(changed_keys(old, new))
        if differing:
            listed = "\n".join(f"  {key}: {before!r} in the run, {after!r} now" for key, before, after in differing)
            schedule = new["optim"]["schedule"]
            fixing = [key for key, _, _ in differing if key.removeprefix("trainer.") in DEPENDS_ON.get(schedule, ())]
            why = f" optim.schedule={schedule} depends on {', '.join(fixing)}." if fixing else ""
            raise UserError(
                "A run can be resumed only with its own settings, except limits, logging, saving, device and threads. "
                f"These differ:\n{listed}\nLeave them out, or start a new run without resume.{why}"
            )
        clusters = ClusterChoice.from_dict(saved["clusters"]) if saved.get("clusters") else None
        return make_config(new, TrainConfig), clusters


def restore_trainer(trainer: Trainer, saved: dict[str, Any], *, corpus: Corpus, start: Start) -> str:
    """Load a checkpoint into the trainer; raises UserError if it is damaged or the corpus has changed."""
    assert start.checkpoint is not None and start.path is not None
    with checkpoint.explain_damage(start.checkpoint):
        corpus.check_unchanged(saved, splits=SPLITS)
        checkpoint.check_shapes(saved["model"], trainer.model, path=start.checkpoint)
        state = trainer.state_dict()
        for key in ("optimizer", "average", "state", "loss_sum"):
            checkpoint.check_state(state[key], saved.get(key), path=start.checkpoint, name=key)
        trainer.load_state_dict(saved)
        read_metrics(start.path, position=int(saved["metrics_position"]))  # raises if they are damaged
    return f"resumed  at step {trainer.progress.step:,}" if trainer.progress.step else ""
