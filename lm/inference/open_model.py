"""Models out of checkpoints, whatever their kind: neural, n-grams, or a mixture of both."""

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from lm.config.groups import DataConfig
from lm.config.inference import MixtureConfig, Which
from lm.config.schema import NgramConfig
from lm.config.validate import make_config
from lm.data.corpus import Corpus
from lm.data.prepare import open_corpus
from lm.data.text.vocabulary import Vocabulary
from lm.inference.cache import Cached, CacheSettings
from lm.inference.mixture import Mixture
from lm.model.language_model import count_parameters
from lm.model.predictor import Predictor
from lm.ngram.model import unpack_ngrams
from lm.ngram.predictor import STREAMS, NgramPredictor
from lm.system import checkpoint
from lm.system.devices import pick_device
from lm.system.errors import UserError
from lm.system.memory import explain_oom, size_of
from lm.training.checkpointer import num_bytes
from lm.training.restore import restore, unpack_vocabulary


@dataclass(frozen=True)
class Opened:
    """A model with everything that its checkpoint says about it."""

    model: Predictor
    vocabulary: Vocabulary
    data: DataConfig
    """Its training data."""
    streams: int
    """Pieces that a split is cut into when it is evaluated."""
    title: str
    file: Path
    content: dict[str, Any]
    verify: bool = True

    @property
    def folder(self) -> Path:
        """The run directory of its checkpoint, or the folder of a lone checkpoint."""
        return self.file.parent.parent if self.file.parent.name == "checkpoints" else self.file.parent

    def corpus(self, *, splits: Sequence[str], notices: TextIO | None = None) -> Corpus:
        """The corpus it was trained on; UserError if these splits have changed. `notices` replaces stdout."""
        with redirect_stdout(notices or sys.stdout):
            corpus = open_corpus(self.data, verify=self.verify, trusted=False)
        with checkpoint.explain_damage(self.file):
            corpus.check_unchanged(self.content, splits=splits)
        return corpus


def open_model(path: str, *, device: str, which: Which = Which.last, verify: bool = True) -> Opened:
    """What a run directory or a checkpoint file holds, ready for inference."""
    file = checkpoint.find(path, name=f"{which.value}.pt")
    content, chosen = checkpoint.load(file, verify=verify), pick_device(device, key="device")
    size = num_bytes(content.get("model"))
    with explain_oom(chosen, doing="loading the model", advice=lambda: f"It needs {size_of(2 * size)}."):
        return replace(open_content(content, file=file, device=chosen), verify=verify)


def open_content(content: dict[str, Any], *, file: Path, device: torch.device) -> Opened:
    kind = content.get("kind", "neural")
    with checkpoint.explain_damage(file):
        if kind == "ngram":
            return _open_ngrams(content, file=file)
        if kind == "mixture":
            return _open_mixture(content, file=file, device=device)
        int(content["progress"]["step"])  # or it is damaged
        model, vocabulary, config = restore(content, path=file, device=device)
        names = f"input={config.input.name} model={config.model.name} output={config.output.name}"
        title = f"{names}, {len(vocabulary):,} words, {count_parameters(model):,} parameters"
        return Opened(model.eval(), vocabulary, config.data, config.evaluate.streams, title, file, content)


def _open_ngrams(content: dict[str, Any], *, file: Path) -> Opened:
    config, vocabulary = make_config(content["config"], NgramConfig), unpack_vocabulary(content)
    model = unpack_ngrams(content["model"], vocabulary, path=file)
    title = f"{model.order}-gram, {len(vocabulary):,} words, {len(model.log_probs_M):,} n-grams"
    return Opened(NgramPredictor(model), vocabulary, config.data, STREAMS, title, file, content)


def _open_mixture(content: dict[str, Any], *, file: Path, device: torch.device) -> Opened:
    config, vocabulary = make_config(content["config"], MixtureConfig), unpack_vocabulary(content)
    members = [open_content(member, file=file, device=device) for member in content["members"]]
    check_vocabularies(members)
    model = put_together(members, config.weights, cache_of(config, vocabulary))
    title = " + ".join(f"{weight:.3f} x ({m.title})" for weight, m in zip(config.weights, members, strict=True))
    title += f", cache={config.cache.value}" if config.cache is not None else ""
    return Opened(model, vocabulary, config.data, config.streams, title, file, content)


def cache_of(config: MixtureConfig, vocabulary: Vocabulary) -> CacheSettings | None:
    if config.cache is None:
        return None
    assert config.cache_size is not None and config.cache_sharpness is not None and config.cache_weight is not None
    boundary = boundary_id(config.cache_boundary, vocabulary)
    return CacheSettings(config.cache, config.cache_size, config.cache_sharpness, config.cache_weight, boundary)


def boundary_id(word: str | None, vocabulary: Vocabulary) -> int | None:
    """The word that empties a cache."""
    if word is None:
        return None
    if word not in vocabulary.ids:
        raise UserError(
            f"cache_boundary must be a word of the vocabulary; got {word!r}. Try \"cache_boundary='</s>'\"."
        )
    return vocabulary.ids[word]


def put_together(members: list[Opened], weights: list[float], cache: CacheSettings | None) -> Predictor:
    """One model of several: mixed, if there is more than one, and with the cache."""
    model = Mixture([member.model for member in members], weights) if len(members) > 1 else members[0].model
    return model if cache is None else Cached(model, cache)


def check_vocabularies(members: list[Opened]) -> None:
    first, *others = members
    for other in others:
        if other.vocabulary.hash != first.vocabulary.hash:
            raise UserError(
                f"Models can be mixed only if they share one vocabulary, word by word and count by count: {first.file} "
                f"has {len(first.vocabulary):,} words, {other.file} {len(other.vocabulary):,}, and the two differ. "
                "Train or count both with the same data settings"
            )
