"""Use trained models from Python:

model = lm.load("runs/NAME")
model.next_word("the object has a", k=5)
model.score("the object has a method").perplexity
model.surprisal(["the object has a method", "the method returns"])
"""

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from lm.config.inference import GenerateConfig, ModelChoice, ScoringOverrides, Which
from lm.config.validate import default_values, make_config, unknown_key
from lm.data.source import rule_of
from lm.data.text.vocabulary import EOS, UNK
from lm.inference.dynamic import make_dynamic
from lm.inference.generation import sample_texts
from lm.inference.lines import LineBlock, Totals, input_ids, measure_lines, next_words
from lm.inference.open_model import LoadedModel, load_model
from lm.inference.surprisal import COLUMNS, Token, as_tsv, surprisals
from lm.model.language_model import LanguageModel
from lm.model.predictor import Predictions
from lm.system.console import counted, table
from lm.system.devices import disable_tf32
from lm.system.errors import UserError

ROWS = 60
"""Rows that a table's repr shows."""


@dataclass(frozen=True)
class TextScore:
    """Log-probabilities of a text."""

    tokens: list[str]
    """Words or subwords, ending with `</s>`; OOV words are `<unk>`."""
    log_probs: list[float]
    """Natural log-probability of each token given the previous ones."""

    def __repr__(self) -> str:
        return f"TextScore({' '.join(self.tokens)!r}, log_prob={self.log_prob:.4f}, perplexity={self.perplexity:.2f})"

    @property
    def log_prob(self) -> float:
        return math.fsum(self.log_probs)

    @property
    def perplexity(self) -> float:
        return math.exp(-self.log_prob / len(self.log_probs))

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with the columns token and log_prob; needs pandas."""
        import pandas

        return pandas.DataFrame({"token": self.tokens, "log_prob": self.log_probs})


class SurprisalTable(list[Token]):
    """Tokens of several sentences in order; see `lm.inference.surprisal.Token`."""

    def __repr__(self) -> str:
        rows = [line.split("\t") for line in as_tsv(self[:ROWS])][2:]
        more = f"\n... {counted(len(self), 'token')}" if len(self) > ROWS else ""
        return table(rows, header=COLUMNS) + more

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a column per field; needs pandas."""
        import pandas

        return pandas.DataFrame(map(asdict, self), columns=COLUMNS)


class TrainedModel:
    """A language model of any kind in evaluation mode, with its vocabulary.

    Each text is one sentence: it follows `</s>` and starts from a zero state. Methods raise UserError for bad input.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded, self.model, self.vocabulary = loaded, loaded.model, loaded.vocabulary
        self._title, self._rule = loaded.title, rule_of(loaded.data)

    def __repr__(self) -> str:
        return f"TrainedModel({self._title})"

    def next_word(self, text: str = "", k: int = 5) -> list[tuple[str, float]]:
        """Return the k most likely next words with their probabilities, sorted.

        >>> model.next_word("the object has a", k=2)
        [('method', 0.12), ('name', 0.05)]
        """
        ((words, probs),) = next_words([[*self._words(_sentence(text)), EOS]], self._loaded, k=k)
        return list(zip(words, probs, strict=True))

    @overload
    def score(self, text: str) -> TextScore: ...
    @overload
    def score(self, text: list[str]) -> list[TextScore]: ...
    def score(self, text: str | list[str]) -> TextScore | list[TextScore]:
        """Score a sentence, or several in one batch, from the first word to `</s>`.

        >>> model.score("the object has a method").perplexity
        """
        measured = measure_lines([[*self._words(one), EOS] for one in _sentences(text)], self._loaded)
        scores = [TextScore(tokens, log_probs.tolist()) for tokens, log_probs in measured]
        return scores[0] if isinstance(text, str) else scores

    def surprisal(
        self, sentences: str | Sequence[str], *, adapt: bool = False, dynamic_lr: float | None = None
    ) -> SurprisalTable:
        """Return surprisal, entropy and rank of every token, in bits.

        The first token is predicted after `</s>` from a zero state; `</s>` is also the last one. With `adapt`, the
        model learns from each sentence after scoring it and forgets them all at the end; `dynamic_lr` is tuned on the
        run's validation text by default.

        >>> model.surprisal(["the cat sat", "the dog barked"]).to_pandas()
        """
        lines, loaded = _sentences(sentences), self._loaded
        if not isinstance(adapt, bool) or (dynamic_lr is not None and not adapt):
            raise UserError(f"adapt must be True or False, and True with dynamic_lr; got {adapt!r}.")
        if adapt:
            chosen = {"dynamic": "sgd", "dynamic_lr": _plain(dynamic_lr)}
            config = make_config(default_values(ScoringOverrides) | chosen, ScoringOverrides)
            (loaded,) = make_dynamic([replace(loaded, streams=1)], config)
        try:
            return SurprisalTable(chain.from_iterable(surprisals(lines, loaded, Totals())))
        finally:
            loaded.model.initial_state(1)  # restores the trained weights

    def log_probs(self, text: str = "") -> Tensor:
        """Return natural log-probabilities of all words, before each word of the text and after the last: (T + 1, V).

        >>> model.log_probs("the object")[-1].argmax()
        """
        return self._read(text).log_prob()[:, 0]

    def hidden_states(self, text: str = "") -> Tensor:
        """Return the hidden states behind these predictions, (T + 1, D), in neural models.

        >>> model.hidden_states("the object has a method").shape
        """
        hidden = self._read(text).hidden
        if hidden is None:
            raise UserError(f"hidden_states needs a neural model; got {self._title}.")
        return hidden[:, 0]

    @torch.no_grad()
    def embed(self, words: str | Sequence[str]) -> Tensor:
        """Return the input vectors of words, (words, E), in neural models.

        >>> model.embed(["object", "method"]).shape
        """
        if not isinstance(self.model, LanguageModel):
            raise UserError(f"embed needs a neural model; got {self._title}.")
        listed = _sentences(words)
        inputs = input_ids(listed, self.vocabulary.encode(listed), self._loaded)
        known = zip(listed, inputs.tolist(), strict=False)
        if unknown := [word for word, id_ in known if id_ == self.vocabulary.unk_id and word != UNK]:
            raise UserError(f"embed needs words of the vocabulary; got {', '.join(map(repr, unknown[:5]))}.")
        vectors: Tensor = self.model.input(torch.from_numpy(inputs).to(self.model.device))
        return vectors

    def generate(self, prompt: str = "", **settings: Any) -> list[str]:
        """Continue a prompt; `settings` are those of `python -m lm.generate`: samples, max_words, temperature, ...

        >>> model.generate("the method", samples=2, max_sentences=1, temperature=0.8, seed=1)
        """
        defaults = default_values(GenerateConfig)
        own = defaults.keys() - default_values(ModelChoice).keys() - {"prompt"}
        for key in settings.keys() - own:
            raise UserError(unknown_key(key, own))
        given = {key: _plain(value) for key, value in settings.items()}
        config = make_config({**defaults, "checkpoint": "-", **given}, GenerateConfig)
        return sample_texts(self._loaded, replace(config, prompt=_sentence(prompt)))

    def _words(self, text: str) -> list[str]:
        return self._rule.words(text.replace("\n", " "))

    @torch.no_grad()
    def _read(self, text: str) -> Predictions:
        """Return predictions after `</s>` and after each word."""
        block = LineBlock.of([[EOS, *self._words(_sentence(text))]], self._loaded)
        words_T1 = torch.from_numpy(block.inputs)[:, None].to(self.model.device)
        return self.model.read(words_T1, self.model.initial_state(1))[0]


def _plain(value: Any) -> Any:
    """Convert a NumPy scalar to a plain number."""
    return value.item() if isinstance(value, np.generic) else value


def _sentence(text: str) -> str:
    if not isinstance(text, str):
        raise UserError(f"The text must be a string; got {type(text).__name__}.")
    return text


def _sentences(texts: Any) -> list[str]:
    """Return one or several sentences as a list."""
    several = isinstance(texts, list | tuple) or getattr(texts, "ndim", 0) == 1  # a pandas Series
    sentences = list(texts) if several else [texts]
    wrong = [type(sentence).__name__ for sentence in sentences if not isinstance(sentence, str)]
    if wrong or not sentences:
        raise UserError(f"Texts must be a string or a list of strings; got {wrong[0] if wrong else 'an empty list'}.")
    return sentences


def load(
    path: str | os.PathLike[str], *, device: str = "cpu", which: Which = "last", verify: bool = True
) -> TrainedModel:
    """Load a model from a run directory (its `last` or `best` weights) or a checkpoint file.

    >>> lm.load("runs/NAME").next_word("the object has a")
    """
    disable_tf32()
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise UserError(f"A model's path must be a run directory or a checkpoint file; got {path!r}.")
    chosen = {"checkpoint": os.fspath(path), "device": device, "which": which, "verify": verify}
    config = make_config(default_values(GenerateConfig) | chosen, GenerateConfig)
    return TrainedModel(load_model(config, device=config.device))
