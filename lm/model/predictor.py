"""Interface of models that read words and predict the next one: neural models, n-grams, mixtures and caches.

Evaluation, scoring, top-k and generation use only this interface. A predictor reads words into a state like a core's:
a tree of tensors with the streams on dimension 1. Its distributions after each word are `Predictions`.

Shapes: T steps, B streams, N positions, V words.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lm.model.base import State
from lm.output.base import OutputLayer, inverse_cdf
from lm.output.maxent import NgramContexts
from lm.system.errors import UserError

GREEDY_BELOW = 1e-6
"""Sampling is greedy below this temperature, given the resolution of log-probabilities."""


class Predictions(ABC):
    """A distribution over the vocabulary at each position; positions are (T, B), or (N,) after `at`."""

    hidden: Tensor | None = None
    """Hidden states behind the predictions, (..., D), in neural models."""

    @abstractmethod
    def at(self, steps_N: Tensor, streams_N: Tensor) -> "Predictions":
        """Select predictions by step and stream."""

    @abstractmethod
    def nll(self, targets: Tensor) -> Tensor:
        """-log p(target) at each position, 0 if the target is ignored; same shape as the targets."""

    @abstractmethod
    def log_prob(self) -> Tensor:
        """Log-probabilities at each position, (..., V)."""

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the k most likely words, or all if there are fewer: (log-probabilities, ids), sorted."""
        log_prob = self.log_prob()
        best = log_prob.topk(min(k, log_prob.size(-1)))
        return best.values, best.indices

    def draw(self, uniform_N: Tensor, *, exclude_id: int | None = None) -> Tensor:
        """Sample one word per position, excluding `exclude_id`; `uniform_N` holds the uniform samples."""
        return inverse_cdf(self._excluding(exclude_id).softmax(-1), uniform_N)[0]

    @torch.no_grad()
    def sample(
        self,
        uniform_N: Tensor,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        exclude_id: int | None = None,
    ) -> Tensor:
        """Sample one word per position, (N,), after applying temperature and truncation.

        `uniform_N` holds one number in [0, 1) per position; a number yields the same word in any batch.
        `exclude_id` is a word that is never sampled, as if its probability were zero.
        """
        if temperature < GREEDY_BELOW:
            temperature, top_k = 1.0, 1
        top_p = None if top_p == 1 else top_p
        if top_k is None and top_p is None and temperature == 1:
            return self.draw(uniform_N, exclude_id=exclude_id)
        if top_k is not None:
            scores_Nk, ids_Nk = self.topk(top_k + 1)  # one extra, to replace the excluded word
            scores_Nk = scores_Nk if exclude_id is None else scores_Nk.masked_fill(ids_Nk == exclude_id, -torch.inf)
            best = scores_Nk.topk(min(top_k, scores_Nk.size(-1)))
            probs_Nk, ids_Nk = (best.values / temperature).softmax(-1), ids_Nk.gather(-1, best.indices)
        else:
            probs_Nk = (self._excluding(exclude_id) / temperature).softmax(-1)
            if top_p is None:
                return inverse_cdf(probs_Nk, uniform_N)[0]
            probs_Nk, ids_Nk = likeliest(probs_Nk, mass=top_p)
        if top_p is not None:
            probs_Nk = probs_Nk.double()
            probs_Nk = probs_Nk.masked_fill(probs_Nk.cumsum(-1) - probs_Nk >= top_p, 0)
        return ids_Nk.gather(-1, inverse_cdf(probs_Nk, uniform_N)[0][:, None]).squeeze(-1)

    def _excluding(self, exclude_id: int | None) -> Tensor:
        log_prob_NV = self.log_prob()
        if exclude_id is not None:
            log_prob_NV[:, exclude_id] = -torch.inf
        return log_prob_NV


def likeliest(probs_NV: Tensor, *, mass: float) -> tuple[Tensor, Tensor]:
    """Return enough of the most likely words to cover `mass` in every row: (probabilities, ids), sorted."""
    k = 64
    while True:
        best = probs_NV.topk(min(k, probs_NV.size(-1)))
        if k >= probs_NV.size(-1) or bool((best.values.sum(-1) >= mass).all()):
            return best.values, best.indices
        k *= 8


class Predictor(nn.Module, ABC):
    """Reads words and predicts the next one."""

    vocab_size: int
    cutoffs: Sequence[int] = ()
    """Word ids at which clusters begin, in models that split their vocabulary by frequency."""
    looks_back: int = 0
    """Number of words that fill caches and bounded memories; evaluation warms up on at least this many."""
    segment: int | None = None
    """Number of words to `read` in one call, in models that learn between calls."""
    hidden_width: int | None = None
    """Width of the predictions' hidden states, if any."""

    @property
    def device(self) -> torch.device:
        """Device of words and predictions: that of the weights, or the CPU for models without any."""
        return next((parameter.device for parameter in self.parameters()), torch.device("cpu"))

    @abstractmethod
    def initial_state(self, num_streams: int) -> State:
        """Return the state before the first word."""

    @abstractmethod
    def read(self, words_TB: Tensor, state: State) -> tuple[Predictions, State]:
        """Return predictions after each word, and the state after the last one."""

    def ids_of_unseen(self, words: Sequence[str]) -> list[int] | None:
        """Return ids that `read` accepts for OOV words; None if the model maps them to `<unk>`."""
        return None

    def check_k(self, k: int) -> None:
        if not hasattr(k, "__index__") or k not in range(1, self.vocab_size + 1):
            raise UserError(f"k must be from 1 to the vocabulary size ({self.vocab_size}); got {k!r}.")


class HiddenPredictions(Predictions):
    """Predictions of an output layer, which computes only the needed part of the distribution.

    With n-gram weights, top-k and sampling use the whole distribution.
    """

    hidden: Tensor

    def __init__(self, hidden: Tensor, output: OutputLayer, contexts: NgramContexts | None = None) -> None:
        """`contexts` are the n-gram histories, in models with n-gram weights."""
        self.hidden, self.output, self.contexts = hidden, output, contexts

    def at(self, steps_N: Tensor, streams_N: Tensor) -> "HiddenPredictions":
        contexts = self.contexts
        if contexts is not None:
            contexts = contexts._replace(hashes=contexts.hashes[steps_N, streams_N])
        return HiddenPredictions(self.hidden[steps_N, streams_N], self.output, contexts)

    def nll(self, targets: Tensor) -> Tensor:
        return self.output.nll(self.hidden, targets, self.contexts)

    @torch.no_grad()
    def log_prob(self) -> Tensor:
        return self.output.log_prob(self.hidden, self.contexts)

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        if self.contexts is not None:
            return super().topk(k)
        return self.output.topk(self.hidden, min(k, self.output.vocab_size))

    def draw(self, uniform_N: Tensor, *, exclude_id: int | None = None) -> Tensor:
        if self.contexts is not None:
            return super().draw(uniform_N, exclude_id=exclude_id)
        return self.output.draw(self.hidden, uniform_N, exclude_id=exclude_id)
