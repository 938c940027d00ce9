"""Choose a cache on validation text: every combination of size and sharpness is tried, each with its best weight."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.config.inference import CacheKind
from lm.inference.cache import Cached, CachedPredictions, CacheSettings, cache_probs
from lm.inference.mixture import fit_weights
from lm.model.predictor import Predictor
from lm.model.scoring import perplexity, token_nll
from lm.system.console import table

SIZES = (100, 500, 2000)
SHARPNESS = {CacheKind.unigram: (1.0, 0.99, 0.95), CacheKind.continuous: (0.1, 0.3, 0.5, 1.0, 2.0)}
LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1 - 1e-6
NAMES = {CacheKind.unigram: "decay", CacheKind.continuous: "theta"}


class Trial(NamedTuple):
    """A cache and the perplexity of the validation text with it."""

    settings: CacheSettings
    perplexity: float


def try_caches(
    model: Predictor,
    tokens: NDArray[Any],
    *,
    kind: CacheKind,
    sizes: Sequence[int],
    sharpness: Sequence[float],
    weight: float | None,
    boundary: int | None,
    **reading: Any,
) -> list[Trial]:
    """All combinations in one reading of the text; `reading` is for `token_nll`. Without a `weight` EM finds one."""
    choices = [CacheSettings(kind, size, sharp, 0.5, boundary) for size, sharp in product(sizes, sharpness)]

    def ask(predictions: CachedPredictions, targets_TB: Tensor) -> Tensor:
        """The model's own negative log-likelihood, and the probability that each cache gives; -1 if it is empty."""
        assert predictions.history is not None
        found = [predictions.predictions.nll(targets_TB).double()]
        for choice in choices:
            words_TBE, shares_TBE = predictions.history.shares(choice.size, choice.rate)
            probs_TB = cache_probs(words_TBE, shares_TBE, targets_TB)
            found.append(torch.where(shares_TBE.sum(-1) > 0, probs_TB, -1))
        return torch.stack(found)

    largest = Cached(model, replace(choices[0], size=max(sizes)))
    nll_N, *cached = token_nll(largest, tokens, of=ask, **reading)
    trials = []
    for choice, probs_N in zip(choices, cached, strict=True):
        filled_N = probs_N >= 0
        with np.errstate(divide="ignore"):
            log_probs_2N = np.stack([-nll_N[filled_N], np.log(probs_N[filled_N])])
        best = weight if weight is not None else fit_weights(log_probs_2N)[0][1] if filled_N.any() else 0.0
        best = min(max(best, LEAST_WEIGHT), MOST_WEIGHT)
        mixed_N = np.logaddexp(log_probs_2N[0] + np.log1p(-best), log_probs_2N[1] + np.log(best))
        nll = float(nll_N[~filled_N].sum() - mixed_N.sum())
        trials.append(Trial(replace(choice, weight=best), perplexity(nll, len(nll_N))))
    return trials


def trials_table(trials: Sequence[Trial]) -> str:
    best = min(trials, key=lambda trial: trial.perplexity)
    rows = []
    for trial in trials:
        size, sharpness, weight = trial.settings.size, trial.settings.sharpness, trial.settings.weight
        mark = "best" if trial is best else ""
        rows.append([size, f"{sharpness:g}", f"{weight:.4f}", f"{trial.perplexity:.2f}", mark])
    return table(rows, header=["cache size", NAMES[trials[0].settings.kind], "weight", "valid ppl", ""])
