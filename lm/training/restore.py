"""Restore models and vocabularies from checkpoints; start new runs from the weights of others."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lm.config.groups import find_plugin
from lm.config.schema import TrainConfig
from lm.config.validate import make_config
from lm.data.text.vocabulary import Vocabulary, open_vocabulary
from lm.model.language_model import LanguageModel, build_model
from lm.output.clusters.partition import ClusteredConfig
from lm.system import checkpoint
from lm.system.errors import UserError
from lm.training.averaging import use_average


def restore(
    content: dict[str, Any], *, path: Path, device: torch.device
) -> tuple[LanguageModel, Vocabulary, TrainConfig]:
    """Build the model in a checkpoint, with pending decay applied or, if enabled, EMA weights."""
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
    """Return a vocabulary's files as byte tensors, and its hash."""
    files = {name: torch.from_numpy(np.frombuffer(data, np.uint8).copy()) for name, data in vocabulary.files().items()}
    return {"hash": vocabulary.hash, "files": files}


def unpack_vocabulary(content: dict[str, Any]) -> Vocabulary:
    """Read the vocabulary in a checkpoint."""
    packed = content["vocabulary"]
    vocabulary = open_vocabulary({name: data.numpy().tobytes() for name, data in packed["files"].items()})
    if vocabulary.hash != packed["hash"]:
        raise UserError("Corrupt checkpoint: vocabulary hash mismatch.")
    return vocabulary


# ---- starting a new run from another run's weights -------------------------------------------------------------------
#
# `init=runs/OTHER`, on any corpus. A word's weights are copied to the same word. Words missing from the other run stay
# random, as do words whose vectors have a different width because their cluster differs. All other weights must have
# the same shapes.


@dataclass(frozen=True)
class WarmStart:
    """A trained model to start from."""

    file: Path
    model: LanguageModel
    vocabulary: Vocabulary
    config: TrainConfig
    """Settings of the trained model's run."""
    step: int

    @classmethod
    def open(cls, config: TrainConfig) -> "WarmStart":
        """Load the model of `init`; its input, core and output layer must have the same types as in the new run."""
        assert config.init is not None
        file = checkpoint.find(config.init)
        content = checkpoint.load(file, trained=True, verify=config.verify)
        model, vocabulary, theirs = restore(content, path=file, device=torch.device("cpu"))
        for group in ("input", "model", "output"):
            before, now = getattr(theirs, group).name, getattr(config, group).name
            if before != now:
                raise UserError(
                    f"init={config.init} needs {group}={before}, the kind of its weights; got {group}={now}. "
                    f"Try {group}={before}."
                )
        return cls(file, model, vocabulary, theirs, content["progress"]["step"])

    def with_clusters(self, config: TrainConfig, *, vocab_size: int) -> TrainConfig:
        """Replace automatic clusters by the other run's, if they fit the vocabulary."""
        output, theirs = config.output, self.config.output
        if not isinstance(output, ClusteredConfig) or not isinstance(theirs, ClusteredConfig):
            return config
        if output.cutoffs != "auto" or max(theirs.chosen_cutoffs, default=0) >= vocab_size:
            return config
        return replace(config, output=replace(output, cutoffs=theirs.chosen_cutoffs))

    def load_into(self, model: LanguageModel, vocabulary: Vocabulary) -> str:
        """Copy the weights; return a line for the report."""
        other, known = self.model, self.vocabulary
        rows, their_rows = _rows(model), _rows(other)
        if known.words != vocabulary.words and (rows is None or their_rows is None):
            raise UserError(
                f"init={self.file} uses another vocabulary, and output={self.config.output.name} cannot map weights "
                "between vocabularies. Train both runs on the same corpus, or use another output layer."
            )
        sources, problems = other.state_dict(), []
        for name, target in model.state_dict().items():
            source = sources.pop(name, None)
            if rows is not None and their_rows is not None and name in rows and name in their_rows:
                if source is not None and source.shape[1:] == target.shape[1:]:
                    _copy_rows(source, target, of=_words(their_rows[name], known), to=_words(rows[name], vocabulary))
                    continue
            elif source is not None and source.shape == target.shape:
                with torch.no_grad():
                    target.copy_(source)
                continue
            problems.append(f"{name} is {_shape(source)} there and {_shape(target)} here")
        problems += [f"{name} is {_shape(source)} there and missing here" for name, source in sources.items()]
        if problems:
            raise UserError(
                f"init={self.file} has other sizes: {'; '.join(problems[:3])}. Use the sizes in that run's config.yaml."
            )
        model.load_state_dict(model.state_dict())  # layers derive state from loaded weights
        same = len(set(vocabulary.words) & set(known.words))
        fresh = f", {len(vocabulary) - same:,} initialized randomly" if same < len(vocabulary) else ""
        return f"init     weights of step {self.step:,} of {self.file}: {same:,} shared words{fresh}"


def _rows(model: LanguageModel) -> dict[str, list[int]] | None:
    """Map each parameter that has a row per word to its word ids; None if weights cannot be mapped."""
    of_output = model.output.rows_by_word()
    if of_output is None or model.maxent is not None:  # n-grams are hashed by word ids
        return None
    pairs = [*model.input.rows_by_word(), *of_output]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: ids for parameter, ids in pairs}


def _words(ids: list[int], vocabulary: Vocabulary) -> dict[Any, int]:
    """Return row numbers by word, and by (negative) id for rows without a word."""
    return {vocabulary.words[number] if number >= 0 else number: row for row, number in enumerate(ids)}


def _copy_rows(source: Tensor, target: Tensor, *, of: dict[Any, int], to: dict[Any, int]) -> None:
    shared = [(row, of[word]) for word, row in to.items() if word in of]
    if shared:
        rows, their_rows = torch.tensor(shared).T
        with torch.no_grad():
            target[rows] = source[their_rows]


def _shape(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else "x".join(map(str, tensor.shape)) or "a number"
