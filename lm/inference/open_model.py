"""Load models for inference from any kind of checkpoint: neural, n-gram or mixture."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lm.config.groups import DataConfig
from lm.config.inference import ModelChoice, ScoringOverrides, Which
from lm.config.schema import NgramConfig
from lm.config.validate import make_config
from lm.data.corpus import Corpus, SplitText, open_corpus
from lm.data.text.vocabulary import Vocabulary
from lm.model.language_model import count_parameters
from lm.model.predictor import Predictor
from lm.model.scoring import Score, score
from lm.system import checkpoint
from lm.system.devices import pick_device
from lm.system.errors import UserError
from lm.system.memory import explain_oom, num_bytes, size_of
from lm.training.restore import restore, unpack_vocabulary


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for inference, with metadata from its checkpoint."""

    model: Predictor
    vocabulary: Vocabulary
    data: DataConfig
    """Settings of the training data."""
    streams: int
    """Number of contiguous streams that a split is cut into for scoring; 0 scores lines one by one."""
    title: str
    """One-line description of the model."""
    file: Path
    content: dict[str, Any]
    """Contents of the checkpoint."""
    name: str = ""
    """Path of the run directory or checkpoint file, as given."""
    tags: tuple[str, ...] = ()
    """Options that distinguish the model from its checkpoint, for file names."""
    batch_size: int = 64
    """Number of streams scored together."""
    verify: bool = True
    parts: Sequence["LoadedModel"] = ()
    """The models that this one combines."""

    @property
    def members(self) -> Sequence["LoadedModel"]:
        """The combined models, or the model itself."""
        return self.parts or [self]

    @property
    def label(self) -> str:
        """The name for tables, which mark dynamic evaluation."""
        return f"{self.name}, dynamic" if self.model.segment else self.name

    @property
    def folder(self) -> Path:
        """The run directory, or the checkpoint's folder if it is outside a run."""
        return self.file.parent.parent if self.file.parent.name == "checkpoints" else self.file.parent

    def corpus(self, splits: Sequence[str]) -> Corpus:
        """Load the training corpus; raises UserError if these splits have changed since."""
        corpus = open_corpus(self.data, verify=self.verify, trusted=False)
        with checkpoint.explain_damage(self.file):
            corpus.check_unchanged(self.content, splits=splits)
        return corpus

    def validation_text(self) -> SplitText:
        try:
            return self.corpus(["valid"]).text("valid")
        except UserError as error:
            hint = "It is needed because settings that are not given are tuned on it."
            raise UserError(f"{self.name}: cannot read the run's validation text. {hint} {error}") from None

    def reading(self, label: str) -> dict[str, Any]:
        """Return options for `token_nll`."""
        options = {"streams": self.streams, "batch_size": self.batch_size}
        return {**options, "eos_id": self.vocabulary.eos_id, "label": label}

    def score(self, split: str, text: SplitText) -> Score:
        return score(self.model, text, self.vocabulary, label=split, streams=self.streams, batch_size=self.batch_size)

    def scores(self, split: str, text: SplitText) -> dict[str, Score]:
        """Return scores by name. A combined model also scores its members, and itself last."""
        return {self.label: self.score(split, text)}


def load_model(config: ModelChoice, *, device: str, scoring: ScoringOverrides | None = None) -> LoadedModel:
    """Load the model selected by the settings: a single run or a mixture, optionally with a cache."""
    assert config.checkpoint is not None
    scoring = scoring or ScoringOverrides()
    members = []
    for name in [config.checkpoint, *config.mix]:
        member = open_model(name, device=device, which=config.which, verify=config.verify)
        streams = scoring.streams or (1 if scoring.dynamic else member.streams)
        members.append(replace(member, streams=streams, batch_size=scoring.batch_size))
    if not scoring.normalize:
        from lm.inference.unnormalized import unnormalized

        valid = members[0].validation_text().tokens
        members = [unnormalized(member, valid) for member in members]
    if scoring.dynamic is not None:
        from lm.inference.dynamic import make_dynamic

        members = make_dynamic(members, scoring)
    if not config.mix and config.cache is None:
        return members[0]
    from lm.inference.mixture import combine

    return combine(members, config)


def open_model(path: str, *, device: str, which: Which = "last", verify: bool = True) -> LoadedModel:
    """Load a model from a run directory or a checkpoint file."""
    file = checkpoint.find(path, name=f"{which}.pt")
    content, chosen = checkpoint.load(file, verify=verify), pick_device(device, key="device")
    size = num_bytes(content.get("model"))
    with explain_oom(chosen, doing="loading the model", advice=lambda: f"It needs {size_of(2 * size)}."):
        return replace(from_content(content, file=file, device=chosen), name=path, verify=verify)


def from_content(content: dict[str, Any], *, file: Path, device: torch.device) -> LoadedModel:
    """Build the model from the contents of any kind of checkpoint."""
    kind = content.get("kind", "neural")
    with checkpoint.explain_damage(file):
        if kind == "ngram":
            return _from_ngrams(content, file=file)
        if kind == "mixture":
            from lm.inference.mixture import from_mixture

            return from_mixture(content, file=file, device=device)
        int(content["progress"]["step"])
        model, vocabulary, config = restore(content, path=file, device=device)
        names = f"input={config.input.name} model={config.model.name} output={config.output.name}"
        title = f"{names}, {len(vocabulary):,} words, {count_parameters(model):,} parameters"
        return LoadedModel(model.eval(), vocabulary, config.data, config.scoring_streams, title, file, content)


def _from_ngrams(content: dict[str, Any], *, file: Path) -> LoadedModel:
    from lm.ngram.model import STREAMS, CountModel, NgramPredictor, unpack_ngrams
    from lm.ngram.snm import unpack_snm

    config, vocabulary = make_config(content["config"], NgramConfig), unpack_vocabulary(content)
    model: CountModel
    if config.features is None:
        model = unpack_ngrams(content["model"], vocabulary, path=file)
    else:
        model = unpack_snm(content["model"], config.features, vocabulary, path=file)
    title = f"{model.name}, {len(vocabulary):,} words, {model.num_ngrams:,} n-grams"
    return LoadedModel(NgramPredictor(model), vocabulary, config.data, STREAMS, title, file, content)
