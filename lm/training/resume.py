"""Resume a run: its settings and its trainer's state."""

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from lm.config.groups import DEPENDS_ON
from lm.config.schema import TrainConfig
from lm.config.validate import changed_keys, flatten, make_config
from lm.data.corpus import Corpus
from lm.data.source import SPLITS
from lm.output.clusters.choice import ClusterChoice
from lm.system import checkpoint
from lm.system.errors import UserError
from lm.training.metrics import kept_records
from lm.training.run_dir import Start
from lm.training.trainer import Trainer


def after_restart(config: TrainConfig) -> TrainConfig:
    """Return settings with which a restart by torchrun resumes the run instead of starting another."""
    if not int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        return config
    if config.resume in (None, "auto"):
        return replace(config, resume="auto")
    return replace(config, resume=str(checkpoint.find(config.resume).parent.parent))  # last.pt is newer


def resumed_config(
    config: TrainConfig, saved: dict[str, Any], *, file: Path | None, overrides: list[str]
) -> tuple[TrainConfig, ClusterChoice | None]:
    """Merge a resumed run's settings with permitted overrides; also return how its cutoffs were chosen."""
    assert file is not None
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
        kept_records(start.path, int(saved["metrics_position"]))  # raises if they are damaged
    return f"resumed  at step {trainer.progress.step:,}" if trainer.progress.step else ""
