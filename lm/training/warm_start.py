"""`init=runs/OTHER`: a new run that begins with the weights of another, on any text, word by word.

Weights that belong to a word go to the same word; words that the other run does not know start fresh, as do those whose
vectors are of another width here, because they are in another cluster. All other weights must have the same shapes.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lm.config.schema import TrainConfig
from lm.data.text.vocabulary import Vocabulary
from lm.model.language_model import LanguageModel
from lm.output.clusters.settings import ClusteredConfig
from lm.system import checkpoint
from lm.system.errors import UserError
from lm.training.restore import restore


@dataclass(frozen=True)
class WarmStart:
    """The model that a run begins with."""

    file: Path
    model: LanguageModel
    vocabulary: Vocabulary
    config: TrainConfig
    """Its settings."""
    step: int

    @classmethod
    def open(cls, config: TrainConfig) -> "WarmStart":
        """The model of `init`, whose parts must be of the kinds that the new run has."""
        assert config.init is not None
        file = checkpoint.find(config.init)
        content = checkpoint.load(file, trained=True, verify=config.verify)
        model, vocabulary, theirs = restore(content, path=file, device=torch.device("cpu"))
        for group in ("input", "model", "output"):
            before, now = getattr(theirs, group).name, getattr(config, group).name
            if before != now:
                raise UserError(
                    f"init={config.init} has {group}={before}, and its weights suit no other; got {group}={now}. "
                    f"Try {group}={before}"
                )
        return cls(file, model, vocabulary, theirs, content["progress"]["step"])

    def with_clusters(self, config: TrainConfig, *, vocab_size: int) -> TrainConfig:
        """The settings with the clusters of the other run in place of automatic ones, where they fit."""
        output, theirs = config.output, self.config.output
        if not isinstance(output, ClusteredConfig) or not isinstance(theirs, ClusteredConfig):
            return config
        if output.cutoffs != "auto" or max(theirs.cutoffs, default=0) >= vocab_size:
            return config
        return replace(config, output=replace(output, cutoffs=theirs.cutoffs))

    def load_into(self, model: LanguageModel, vocabulary: Vocabulary) -> str:
        """Copy the weights; returns a line about what was copied."""
        other, known = self.model, self.vocabulary
        rows, their_rows = _rows(model), _rows(other)
        if known.words != vocabulary.words and (rows is None or their_rows is None):
            raise UserError(
                f"init={self.file} has other words, and the weights of this output layer cannot be moved to other "
                "words. Train both runs on the same prepared corpus, or take another output layer"
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
                f"init={self.file} is a model of other sizes: {'; '.join(problems[:3])}. Give this run the sizes that "
                "config.yaml of the other has"
            )
        model.load_state_dict(model.state_dict())  # layers derive things from what they load
        same = len(set(vocabulary.words) & set(known.words))
        fresh = f", {len(vocabulary) - same:,} start fresh" if same < len(vocabulary) else ""
        return f"init     weights of step {self.step:,} of {self.file}: {same:,} words known{fresh}"


def _rows(model: LanguageModel) -> dict[str, list[int]] | None:
    """The words of the rows of each parameter that has a row per word, by its name; None where weights cannot move."""
    of_output = model.output.rows_by_word()
    if of_output is None or model.maxent is not None:  # n-grams are hashed by the numbers of their words
        return None
    pairs = [*model.input.rows_by_word(), *of_output]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: ids for parameter, ids in pairs}


def _words(ids: list[int], vocabulary: Vocabulary) -> dict[Any, int]:
    """Row numbers by word; rows that belong to no word by their own number."""
    return {vocabulary.words[number] if number >= 0 else number: row for row, number in enumerate(ids)}


def _copy_rows(source: Tensor, target: Tensor, *, of: dict[Any, int], to: dict[Any, int]) -> None:
    shared = [(row, of[word]) for word, row in to.items() if word in of]
    if shared:
        rows, their_rows = torch.tensor(shared).T
        with torch.no_grad():
            target[rows] = source[their_rows]


def _shape(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else "x".join(map(str, tensor.shape)) or "a number"
