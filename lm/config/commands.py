"""Everything that each command takes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from lm.config.data import DataConfig, EncodingErrors
from lm.config.model import ModelConfig, OptimConfig, OutputConfig, Schedule
from lm.config.rules import Count, MayChange, OptionalCount, Range
from lm.config.running import EvaluateConfig, TrainerConfig, device_problems


@dataclass
class Config:
    """Everything `train.py` takes."""

    data: DataConfig
    model: ModelConfig
    output: OutputConfig
    optim: OptimConfig
    trainer: TrainerConfig
    evaluate: EvaluateConfig
    seed: Annotated[int, Range(least=0)]
    """Weights, dropout and sampling are functions of it and of the step."""
    run_dir: Annotated[str | None, MayChange]
    """Where the run writes; null makes a fresh, readable name under runs/."""
    resume: Annotated[str | None, MayChange]
    """null starts afresh; `auto` continues; a run directory or checkpoint continues that one."""

    def problems(self) -> Iterator[str]:
        for key in ("run_dir", "resume"):
            if getattr(self, key) == "":
                yield f"{key} must not be empty. Try {key}=null"
        if self.optim.schedule is Schedule.halve_after_half and self.trainer.max_epochs is None:
            yield (
                "optim.schedule=halve_after_half needs trainer.max_epochs, whose half it halves after; got null. "
                "Try trainer.max_epochs=10"
            )


@dataclass
class OtherTextConfig:
    """Text other than the run's own corpus, read by the run's rules and with its vocabulary."""

    dir: str | None
    """Folder with any of train.txt, valid.txt, test.txt, as for data=text; null evaluates the run's corpus."""
    encoding_errors: EncodingErrors = EncodingErrors.strict
    """Its bytes that are no text: strict refuses the file, naming the first; replace makes them U+FFFD."""


@dataclass
class EvaluateCommandScoring:
    """As `evaluate` in training."""

    streams: OptionalCount
    """null takes the run's own."""
    batch_size: Count


SPLIT_NAMES = ("train", "valid", "test")


@dataclass
class EvaluateCommandConfig:
    """Everything `evaluate.py` takes."""

    checkpoint: str | None
    """A run directory or a checkpoint file."""
    data: OtherTextConfig
    splits: list[str]
    """Of train, valid and test."""
    evaluate: EvaluateCommandScoring
    device: str
    json: str | None
    """Where the figures are written; null writes evaluation.json beside the checkpoint."""

    def problems(self) -> Iterator[str]:
        if not self.checkpoint:
            yield ("checkpoint must name a run directory or a checkpoint file; got nothing. Try checkpoint=runs/NAME")
        if not self.splits or set(self.splits) - set(SPLIT_NAMES):
            yield f"splits must be a list of {', '.join(SPLIT_NAMES)}; got {self.splits}. Try splits=[valid,test]"
        yield from device_problems("device", self.device)
