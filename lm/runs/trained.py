"""A trained model for use from Python:

model = lm.load("runs/NAME")
model.next_word("the object has a", k=5)
model.score("the object has a method").perplexity
"""

import math
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from lm.config.commands import TrainConfig
from lm.data.settings import rule_of
from lm.data.text.vocabulary import EOS, Vocabulary
from lm.inference.lines import input_ids
from lm.model.language_model import LanguageModel, count_parameters
from lm.runs.assembly import open_checkpoint
from lm.system.arithmetic import exact_products


@dataclass(frozen=True)
class TextScore:
    """What a model makes of a text."""

    tokens: list[str]
    """Words, or subword pieces, and the `</s>` at the end; `<unk>` for words outside the vocabulary."""
    log_probs: list[float]
    """Natural log-probability of each token after those before it."""

    @property
    def log_prob(self) -> float:
        return math.fsum(self.log_probs)

    @property
    def perplexity(self) -> float:
        return math.exp(-self.log_prob / len(self.log_probs))


class TrainedModel:
    """A language model with its vocabulary and settings, in evaluation mode."""

    def __init__(self, model: LanguageModel, vocabulary: Vocabulary, config: TrainConfig) -> None:
        self.model, self.vocabulary, self.config = model, vocabulary, config

    def __repr__(self) -> str:
        parts = f"input={self.config.input.name} model={self.config.model.name} output={self.config.output.name}"
        return f"TrainedModel({parts}, {len(self.vocabulary):,} words, {count_parameters(self.model):,} parameters)"

    def next_word(self, text: str = "", k: int = 5) -> list[tuple[str, float]]:
        """The k likeliest words after a text and their probabilities, likeliest first."""
        hidden_TD = self._read(self._ids(text)[1])
        log_probs_k, ids_k = self.model.output.topk(hidden_TD[-1:], k)
        words = self.vocabulary.decode(ids_k[0].tolist())
        return list(zip(words, log_probs_k[0].exp().tolist(), strict=True))

    def score(self, text: str) -> TextScore:
        """The probability of a text as one sentence, from its first word to `</s>`."""
        ids, inputs = self._ids(text)
        ids = [*ids, self.vocabulary.eos_id]
        targets_T = torch.tensor(ids, device=self.model.device)
        nll_T = self.model.output.nll(self._read(inputs), targets_T)
        return TextScore(list(self.vocabulary.decode(ids)), (-nll_T).tolist())

    def _ids(self, text: str) -> tuple[list[int], list[int]]:
        """A text as the vocabulary's ids, and as the ids by which the model reads it."""
        words = [EOS, *rule_of(self.config.data).words(text.replace("\n", " "))]
        ids = self.vocabulary.encode(words)
        inputs = input_ids(self.model.input, words, ids, vocabulary=self.vocabulary)
        return ids[1:].tolist(), inputs[1:].tolist()

    @torch.no_grad()
    def _read(self, ids: list[int]) -> Tensor:
        """Hidden states (T, D) after `</s>` and after each of the words."""
        words_T = torch.tensor([self.vocabulary.eos_id, *ids], device=self.model.device)
        hidden_T1D: Tensor = self.model(words_T[:, None], self.model.initial_state(1))[0]
        return hidden_T1D[:, 0]


def load(path: str | os.PathLike[str], *, device: str = "cpu") -> TrainedModel:
    """The trained model of a run directory or a checkpoint file.

    >>> lm.load("runs/NAME").next_word("the object has a")
    """
    exact_products()
    return TrainedModel(*open_checkpoint(os.fspath(path), device=device))
