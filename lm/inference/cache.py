"""Caches: words that came up lately are likelier to come again.

    p(w) = (1 - weight) p_model(w) + weight p_cache(w)

The cache holds the last `size` words and shares out its probability among them: equally, or less with each word read
since (`unigram`, after Kuhn and De Mori, 1990), or in proportion to exp(theta h . h_i), where h is the hidden state now
and h_i the one that came before that word (`continuous`, after Grave, Joulin and Usunier, 2017). An empty cache leaves
the model's prediction as it is.

Shapes: T steps, B streams, E words in the cache, D width of the hidden state, V words.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lm.config.inference import CacheKind
from lm.model.base import State
from lm.model.predictor import Predictions, Predictor
from lm.output.base import IGNORE_INDEX


@dataclass(frozen=True)
class CacheSettings:
    """A cache with everything chosen."""

    kind: CacheKind
    size: int
    """Words that it holds."""
    sharpness: float
    """decay for `unigram`: each word read since multiplies a word's share by it. theta for `continuous`."""
    weight: float
    boundary: int | None = None
    """A word that empties the cache."""

    @property
    def rate(self) -> float:
        """By which scores are multiplied: of hidden states, or the negative ages of words."""
        return self.sharpness if self.kind is CacheKind.continuous else -math.log(self.sharpness)


class Cached(Predictor):
    """A model with a cache."""

    def __init__(self, model: Predictor, settings: CacheSettings) -> None:
        super().__init__()
        self.model, self.settings = model, settings
        self.vocab_size, self.cutoffs, self.hidden_width = model.vocab_size, model.cutoffs, model.hidden_width
        self.looks_back = max(model.looks_back, settings.size)
        assert settings.kind is CacheKind.unigram or self.hidden_width is not None

    @property
    def device(self) -> torch.device:
        return self.model.device

    def initial_state(self, num_streams: int) -> State:
        words_EB = torch.empty(0, num_streams, dtype=torch.long, device=self.device)
        width = self.hidden_width if self.settings.kind is CacheKind.continuous else 0
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
        if self.settings.kind is CacheKind.continuous:
            hidden_TBD = predictions.hidden
            assert hidden_TBD is not None
            # A word's key is the hidden state before it, so that the first word of all has none.
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
    """What each of the last T places can see of the words read so far."""

    def __init__(
        self, words_EB: Tensor, keys_EBD: Tensor, hidden_TBD: Tensor | None, *, num_steps: int, boundary: int | None
    ) -> None:
        self.words_EB = words_EB
        device, number_E = words_EB.device, torch.arange(len(words_EB), device=words_EB.device)
        ends_T = len(words_EB) - num_steps + 1 + torch.arange(num_steps, device=device)
        self.age_T1E = (ends_T[:, None] - 1 - number_E)[:, None]
        """Words read since; negative for those that are yet to come."""
        self.seen_TBE = (self.age_T1E >= 0).expand(-1, words_EB.size(1), -1)
        if boundary is not None:
            passed_EB = (words_EB == boundary).cumsum(0)
            at_place_TB = torch.cat([passed_EB.new_zeros(1, words_EB.size(1)), passed_EB])[ends_T]
            # As many boundaries before the word as before the place; a boundary itself is not seen.
            same_TBE = (passed_EB.t()[None] == at_place_TB[:, :, None]) & (words_EB != boundary).t()[None]
            self.seen_TBE = self.seen_TBE & same_TBE
        if hidden_TBD is None:
            self.scores_TBE = -self.age_T1E.double().expand(self.seen_TBE.shape)
        else:
            self.scores_TBE = torch.einsum("tbd,ebd->tbe", hidden_TBD, keys_EBD).double()

    def shares(self, size: int, rate: float) -> tuple[Tensor, Tensor]:
        """Words that a cache of this size holds at any place, and their shares at each, both (T, B, E).

        All shares are zero where the cache is empty.
        """
        reach = len(self.age_T1E) + size  # no place looks back further
        seen_TBE, scores_TBE = self.seen_TBE[..., -reach:], self.scores_TBE[..., -reach:]
        unseen_TBE = ~(seen_TBE & (self.age_T1E[..., -reach:] < size))
        shares_TBE = (rate * scores_TBE).masked_fill(unseen_TBE, -torch.inf).softmax(-1).nan_to_num(0)
        return self.words_EB[-reach:].t()[None].expand(shares_TBE.shape), shares_TBE


class CachedPredictions(Predictions):
    """The model's predictions, with the cache's mixed in: `words` and their `shares` at each place, (..., E)."""

    def __init__(
        self, predictions: Predictions, words: Tensor, shares: Tensor, *, weight: float, history: History | None = None
    ) -> None:
        self.predictions, self.words, self.shares, self.weight = predictions, words, shares, weight
        self.hidden, self.history = predictions.hidden, history
        """Of all places, for other caches to be tried on."""

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
    """What the cache alone gives each target."""
    return (shares * (words == targets[..., None])).sum(-1)
