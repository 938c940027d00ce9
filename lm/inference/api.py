"""Use trained models from Python:

model = lm.load("runs/NAME")
model.next_word("the object has a", k=5)
model.score("the object has a method").perplexity
model.surprisal(["the object has a method", "the method returns"])
"""

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch

from lm.config.inference import Which
from lm.data.settings import rule_of
from lm.data.text.vocabulary import EOS
from lm.inference.lines import Totals, input_ids
from lm.inference.open_model import LoadedModel, open_model
from lm.inference.surprisal import COLUMNS, Token, as_tsv, surprisals
from lm.model.predictor import Predictions
from lm.system.precision import disable_tf32


@dataclass(frozen=True)
class TextScore:
    """Log-probabilities of a text."""

    tokens: list[str]
    """Words or subwords, ending with `</s>`; OOV words are `<unk>`."""
    log_probs: list[float]
    """Natural log-probability of each token given the previous ones."""

    @property
    def log_prob(self) -> float:
        return math.fsum(self.log_probs)

    @property
    def perplexity(self) -> float:
        return math.exp(-self.log_prob / len(self.log_probs))


class SurprisalTable(list[Token]):
    """Tokens of several sentences in order; see `lm.inference.surprisal.Token`."""

    def __repr__(self) -> str:
        return "\n".join(as_tsv(self))

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a column per field; needs pandas."""
        import pandas

        return pandas.DataFrame(map(asdict, self), columns=COLUMNS)


class TrainedModel:
    """A language model of any kind in evaluation mode, with its vocabulary."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded, self.model, self.vocabulary = loaded, loaded.model, loaded.vocabulary
        self._title, self._rule = loaded.title, rule_of(loaded.data)

    def __repr__(self) -> str:
        return f"TrainedModel({self._title})"

    def next_word(self, text: str = "", k: int = 5) -> list[tuple[str, float]]:
        """Return the k most likely next words with their probabilities, sorted."""
        inputs = self._ids(text)[1]
        self.model.check_k(k)
        log_probs_k, ids_k = self._read(inputs).at(torch.tensor([len(inputs)]), torch.tensor([0])).topk(k)
        words = self.vocabulary.decode(ids_k[0].tolist())
        return list(zip(words, log_probs_k[0].exp().tolist(), strict=True))

    def score(self, text: str) -> TextScore:
        """Score a text as one sentence, from its first word to `</s>`."""
        ids, inputs = self._ids(text)
        ids = [*ids, self.vocabulary.eos_id]
        targets_T1 = torch.tensor(ids, device=self.model.device)[:, None]
        nll_T = self._read(inputs).nll(targets_T1).squeeze(1)
        return TextScore(list(self.vocabulary.decode(ids)), (-nll_T).tolist())

    def surprisal(self, sentences: str | Sequence[str]) -> SurprisalTable:
        """Return surprisal, entropy and rank of every token, in bits; each sentence starts from a zero state.

        >>> model.surprisal(["the cat sat", "the dog barked"]).to_pandas()
        """
        lines = [sentences] if isinstance(sentences, str) else sentences
        return SurprisalTable(chain.from_iterable(surprisals(lines, self._loaded, Totals())))

    def _ids(self, text: str) -> tuple[list[int], list[int]]:
        """Return a text's vocabulary ids and the model's input ids."""
        words = [EOS, *self._rule.words(text.replace("\n", " "))]
        ids = self.vocabulary.encode(words)
        inputs = input_ids(self.model, words, ids, vocabulary=self.vocabulary)
        return ids[1:].tolist(), inputs[1:].tolist()

    @torch.no_grad()
    def _read(self, ids: list[int]) -> Predictions:
        """Return predictions after `</s>` and after each word."""
        words_T = torch.tensor([self.vocabulary.eos_id, *ids], device=self.model.device)
        return self.model.read(words_T[:, None], self.model.initial_state(1))[0]


def load(
    path: str | os.PathLike[str], *, device: str = "cpu", which: str = "last", verify: bool = True
) -> TrainedModel:
    """Load a model from a run directory (its `last` or `best` weights) or a checkpoint file.

    >>> lm.load("runs/NAME").next_word("the object has a")
    """
    disable_tf32()
    return TrainedModel(open_model(os.fspath(path), device=device, which=Which(which), verify=verify))
