"""Cache models, which raise the probability of recent words, and tuning them on validation text.

    p(w) = (1 - weight) p_model(w) + weight p_cache(w)

The cache holds the last `size` words and distributes its probability over them. `unigram` (Kuhn and De Mori, 1990)
multiplies a word's share by `decay` for each word read since. `continuous` (Grave, Joulin and Usunier, 2017) makes it
proportional to exp(theta h . h_i), where h is the current hidden state and h_i the one before that word. An empty cache
leaves the model's prediction unchanged.

Shapes: T steps, B streams, E words in the cache, D width of the hidden state, V words.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.config.inference import CacheKind, MixtureConfig, ModelChoice
from lm.data.text.vocabulary import Vocabulary
from lm.inference.mixture import fit_weights
from lm.inference.open_model import LoadedModel
from lm.model.base import State
from lm.model.predictor import Predictions, Predictor
from lm.model.scoring import perplexity, token_nll
from lm.output.base import IGNORE_INDEX
from lm.system.console import say, table
from lm.system.errors import UserError

SIZES = (100, 500, 2000)
SHARPNESS = {"unigram": (1.0, 0.99, 0.95), "continuous": (0.1, 0.3, 0.5, 1.0, 2.0)}
"""Sharpness values to try."""
MIN_WEIGHT, MAX_WEIGHT = 1e-6, 1 - 1e-6
NAMES = {"unigram": "decay", "continuous": "theta"}
"""Display name of the sharpness parameter."""


@dataclass(frozen=True)
class CacheSettings:
    """Cache hyperparameters."""

    kind: CacheKind
    size: int
    """Number of words in the cache."""
    sharpness: float
    """`decay` for `unigram`, `theta` for `continuous`."""
    weight: float
    boundary: int | None = None
    """Id of a word that clears the cache."""

    @property
    def rate(self) -> float:
        """Multiplier of the scores: hidden-state dot products, or negative word ages."""
        return self.sharpness if self.kind == "continuous" else -math.log(self.sharpness)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = {"size": self.size, NAMES[self.kind]: self.sharpness, "weight": self.weight}
        return {"kind": self.kind, **values}


class Cached(Predictor):
    """A model combined with a cache."""

    def __init__(self, model: Predictor, settings: CacheSettings) -> None:
        super().__init__()
        self.model, self.settings = model, settings
        self.vocab_size, self.cutoffs, self.hidden_width = model.vocab_size, model.cutoffs, model.hidden_width
        self.looks_back, self.segment = max(model.looks_back, settings.size), model.segment
        assert settings.kind == "unigram" or self.hidden_width is not None
        self.eval()

    def initial_state(self, num_streams: int) -> State:
        words_EB = torch.empty(0, num_streams, dtype=torch.long, device=self.device)
        width = self.hidden_width if self.settings.kind == "continuous" else 0
        nothing_EBD = torch.empty(0, num_streams, width or 0, device=self.device)
        return {
            "model": self.model.initial_state(num_streams),
            "words": words_EB,
            "keys": nothing_EBD,
            "last": nothing_EBD,
        }

    def read(self, words_TB: Tensor, state: State) -> tuple["CachedPredictions", State]:
        predictions, inner = self.model.read(words_TB, state["model"])
        num_steps, size = len(words_TB), self.settings.size
        if self.settings.kind == "continuous":
            hidden_TBD = predictions.hidden
            assert hidden_TBD is not None
            # A word's key is the hidden state before it; the first word has none.
            new_keys = torch.cat([state["last"], hidden_TBD[:-1]])
            new_words, last = words_TB[num_steps - len(new_keys) :], hidden_TBD[-1:]
        else:
            hidden_TBD, new_words, last = None, words_TB, state["last"]
            new_keys = torch.empty(*words_TB.shape, 0, device=self.device)
        words_EB, keys_EBD = torch.cat([state["words"], new_words]), torch.cat([state["keys"], new_keys])
        history = History(words_EB, keys_EBD, hidden_TBD, num_steps=num_steps, boundary=self.settings.boundary)
        after = {"model": inner, "words": words_EB[-size:], "keys": keys_EBD[-size:], "last": last}
        words_TBE, shares_TBE = history.shares(size, self.settings.rate)
        weight = self.settings.weight
        return CachedPredictions(predictions, words_TBE, shares_TBE, weight=weight, history=history), after


class History:
    """Words visible in the cache at each of the last T positions."""

    def __init__(
        self, words_EB: Tensor, keys_EBD: Tensor, hidden_TBD: Tensor | None, *, num_steps: int, boundary: int | None
    ) -> None:
        self.words_EB = words_EB
        device, index_E = words_EB.device, torch.arange(len(words_EB), device=words_EB.device)
        ends_T = len(words_EB) - num_steps + 1 + torch.arange(num_steps, device=device)
        self.age_T1E = (ends_T[:, None] - 1 - index_E)[:, None]
        """Number of words read since each word; negative for later words."""
        self.seen_TBE = (self.age_T1E >= 0).expand(-1, words_EB.size(1), -1)
        if boundary is not None:
            passed_EB = (words_EB == boundary).cumsum(0)
            at_place_TB = torch.cat([passed_EB.new_zeros(1, words_EB.size(1)), passed_EB])[ends_T]
            # A word is visible if no boundary separates it from the position; boundaries themselves are not visible.
            same_TBE = (passed_EB.t()[None] == at_place_TB[:, :, None]) & (words_EB != boundary).t()[None]
            self.seen_TBE = self.seen_TBE & same_TBE
        if hidden_TBD is None:
            self.scores_TBE = -self.age_T1E.double().expand(self.seen_TBE.shape)
        else:
            self.scores_TBE = torch.einsum("tbd,ebd->tbe", hidden_TBD, keys_EBD).double()

    def shares(self, size: int, rate: float) -> tuple[Tensor, Tensor]:
        """Return the words in a cache of this size and their shares by position, both (T, B, E); 0 if empty."""
        reach = len(self.age_T1E) + size  # no position looks back further
        seen_TBE, scores_TBE = self.seen_TBE[..., -reach:], self.scores_TBE[..., -reach:]
        unseen_TBE = ~(seen_TBE & (self.age_T1E[..., -reach:] < size))
        shares_TBE = (rate * scores_TBE).masked_fill(unseen_TBE, -torch.inf).softmax(-1).nan_to_num(0)
        return self.words_EB[-reach:].t()[None].expand(shares_TBE.shape), shares_TBE


class CachedPredictions(Predictions):
    """The model's predictions mixed with the cache's: `words` and their `shares` at each position, (..., E)."""

    def __init__(
        self, predictions: Predictions, words: Tensor, shares: Tensor, *, weight: float, history: History | None = None
    ) -> None:
        self.predictions, self.words, self.shares, self.weight = predictions, words, shares, weight
        self.hidden, self.history = predictions.hidden, history
        """History at all positions, for trying other cache settings."""

    def at(self, steps_N: Tensor, streams_N: Tensor) -> "CachedPredictions":
        words, shares = (values[steps_N, streams_N] for values in (self.words, self.shares))
        return CachedPredictions(self.predictions.at(steps_N, streams_N), words, shares, weight=self.weight)

    def nll(self, targets: Tensor) -> Tensor:
        log_probs = -self.predictions.nll(targets).double()
        mixed = self._mixed(log_probs, cache_probs(self.words, self.shares, targets))
        return torch.where(targets == IGNORE_INDEX, 0, -mixed)

    def log_prob(self) -> Tensor:
        log_probs = self.predictions.log_prob().double()
        return self._mixed(log_probs, torch.zeros_like(log_probs).scatter_add_(-1, self.words, self.shares))

    def _mixed(self, log_probs: Tensor, cached: Tensor) -> Tensor:
        own = log_probs + math.log1p(-self.weight)
        mixed = torch.logaddexp(own, cached.log() + math.log(self.weight))
        empty = self.shares.sum(-1) == 0
        return torch.where(empty if mixed.dim() == empty.dim() else empty[..., None], log_probs, mixed)


def cache_probs(words: Tensor, shares: Tensor, targets: Tensor) -> Tensor:
    """Return the cache's probability of each target."""
    return (shares * (words == targets[..., None])).sum(-1)


# ---- choosing a cache ------------------------------------------------------------------------------------------------


def choose_cache(config: ModelChoice, loaded: LoadedModel) -> CacheSettings:
    """Return the configured cache; unset values are tuned on validation text."""
    assert config.cache is not None
    if config.cache == "continuous" and loaded.model.hidden_width is None:
        raise UserError("cache=continuous compares hidden states, and n-grams have none. Try cache=unigram.")
    sharpness = config.cache_theta if config.cache == "continuous" else config.cache_decay
    boundary = boundary_id(config.cache_boundary, loaded.vocabulary)
    sizes = SIZES if config.cache_size is None else [config.cache_size]
    rates = SHARPNESS[config.cache] if sharpness is None else [sharpness]
    weight, tune = config.cache_weight or 0.5, config.cache_weight is None
    choices = [CacheSettings(config.cache, size, rate, weight, boundary) for size, rate in product(sizes, rates)]
    if len(choices) == 1 and not tune:
        return choices[0]
    text = loaded.validation_text().tokens
    trials = try_caches(loaded.model, text, choices, tune=tune, **loaded.reading("caches"))
    say(f"cache={config.cache}, chosen on the validation text:\n{trials_table(trials)}\n")
    return min(trials, key=trials.__getitem__)


def saved_cache(config: MixtureConfig, vocabulary: Vocabulary) -> CacheSettings:
    """Return the cache of a mixture that was saved as a run."""
    assert config.cache is not None
    assert config.cache_size is not None and config.cache_sharpness is not None and config.cache_weight is not None
    boundary = boundary_id(config.cache_boundary, vocabulary)
    return CacheSettings(config.cache, config.cache_size, config.cache_sharpness, config.cache_weight, boundary)


def boundary_id(word: str | None, vocabulary: Vocabulary) -> int | None:
    """Return the id of the word that clears the cache."""
    if word is None:
        return None
    if word not in vocabulary.ids:
        raise UserError(
            f"cache_boundary must be a word of the vocabulary; got {word!r}. Try \"cache_boundary='</s>'\"."
        )
    return vocabulary.ids[word]


def try_caches(
    model: Predictor, tokens: NDArray[Any], choices: Sequence[CacheSettings], *, tune: bool, **reading: Any
) -> dict[CacheSettings, float]:
    """Return the perplexity of all caches, in one pass; `tune` fits their weights by EM first.

    `reading` holds options of `token_nll`.
    """

    def measure(predictions: CachedPredictions, targets_TB: Tensor) -> Tensor:
        """Return the model's negative log-likelihood, then each cache's probability; -1 if that cache is empty."""
        assert predictions.history is not None
        values = [predictions.predictions.nll(targets_TB).double()]
        for choice in choices:
            words_TBE, shares_TBE = predictions.history.shares(choice.size, choice.rate)
            probs_TB = cache_probs(words_TBE, shares_TBE, targets_TB)
            values.append(torch.where(shares_TBE.sum(-1) > 0, probs_TB, -1))
        return torch.stack(values)

    largest = Cached(model, replace(choices[0], size=max(choice.size for choice in choices)))
    nll_N, *cached = token_nll(largest, tokens, of=measure, **reading)
    trials = {}
    for choice, probs_N in zip(choices, cached, strict=True):
        filled_N = probs_N >= 0
        with np.errstate(divide="ignore"):
            log_probs_2N = np.stack([-nll_N[filled_N], np.log(probs_N[filled_N])])
        best = choice.weight if not tune else fit_weights(log_probs_2N)[0][1] if filled_N.any() else 0.0
        best = min(max(best, MIN_WEIGHT), MAX_WEIGHT)
        mixed_N = np.logaddexp(log_probs_2N[0] + np.log1p(-best), log_probs_2N[1] + np.log(best))
        nll = float(nll_N[~filled_N].sum() - mixed_N.sum())
        trials[replace(choice, weight=best)] = perplexity(nll, len(nll_N))
    return trials


def trials_table(trials: Mapping[CacheSettings, float]) -> str:
    best = min(trials, key=trials.__getitem__)
    rows = [
        [tried.size, f"{tried.sharpness:g}", f"{tried.weight:.4f}", f"{found:.2f}", "best" if tried is best else ""]
        for tried, found in trials.items()
    ]
    return table(rows, header=["cache size", NAMES[best.kind], "weight", "valid ppl", ""])
