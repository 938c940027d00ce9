"""Mixtures: weighted sums of their members' predictions, with weights that EM never makes worse."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lm.config.schema import TrainConfig
from lm.inference.mixture import Mixture, fit_weights
from lm.model.language_model import LanguageModel
from lm.model.scoring import token_nll
from tests.helpers.models import VOCABULARY, log_distributions, reading, score_tokens, small_model, small_ngrams

EOS, SIZE = VOCABULARY.eos_id, len(VOCABULARY)
TEXT = np.random.default_rng(0).integers(0, SIZE, 90)


@pytest.fixture
def neural(tiny: Callable[..., TrainConfig]) -> LanguageModel:
    return small_model(tiny)


@torch.no_grad()
def test_mixture_is_weighted_sum_of_members(neural: LanguageModel) -> None:
    mixture = Mixture([neural, small_ngrams()], [0.3, 0.7])
    words = torch.tensor([[EOS], *([int(word)] for word in TEXT[:12])])
    predictions, _ = mixture.read(words, mixture.initial_state(1))
    own = torch.stack(log_distributions(neural, TEXT[:12].tolist())).double().exp()
    counted, _ = small_ngrams().read(words, small_ngrams().initial_state(1))
    expected: Tensor = 0.3 * own + 0.7 * counted.log_prob()[:, 0].exp()
    torch.testing.assert_close(predictions.log_prob()[:, 0].exp(), expected, rtol=1e-5, atol=1e-7)
    assert predictions.log_prob().exp().sum(-1).flatten().tolist() == pytest.approx([1] * 13, abs=1e-5)
    targets = torch.from_numpy(TEXT[:13])[:, None]
    torch.testing.assert_close(
        predictions.nll(targets)[:, 0], -expected.gather(1, targets)[:, 0].log(), rtol=1e-5, atol=1e-6
    )
    best, ids = predictions.at(torch.tensor([12]), torch.tensor([0])).topk(3)
    torch.testing.assert_close(best[0].exp(), expected[12].topk(3).values, rtol=1e-5, atol=1e-7)
    assert ids[0].tolist() == expected[12].topk(3).indices.tolist()
    assert predictions.hidden is not None and mixture.hidden_width == neural.hidden_width


def test_mixing_model_with_itself_keeps_predictions(neural: LanguageModel) -> None:
    for model in (neural, small_ngrams()):
        alone = score_tokens(model, TEXT, streams=3, batch_size=2)
        both = score_tokens(Mixture([model, model], [0.25, 0.75]), TEXT, streams=3, batch_size=2)
        assert both.perplexity == pytest.approx(alone.perplexity, rel=1e-9)
        nll = token_nll(model, TEXT, **reading(3, 2))
        assert nll.sum() == pytest.approx(alone.nll, rel=1e-9)
        weights, _ = fit_weights(np.stack([-nll, -nll]))
        assert weights == pytest.approx([0.5, 0.5])


log_probs = st.integers(1, 4).flatmap(
    lambda models: st.lists(
        st.lists(st.floats(-800, 0, allow_subnormal=False), min_size=models, max_size=models), min_size=1, max_size=30
    )
)


@settings(max_examples=100, deadline=None)
@given(log_probs)
def test_em_never_decreases_likelihood(values: list[list[float]]) -> None:
    log_probs_KN = np.array(values).T
    weights, trace = fit_weights(log_probs_KN)
    assert sum(weights) == pytest.approx(1) and min(weights) >= 0
    assert all(after >= before - 1e-9 * abs(before) - 1e-12 for before, after in pairwise(trace))
    with np.errstate(divide="ignore"):
        mixed = np.logaddexp.reduce(log_probs_KN + np.log(weights)[:, None])
    assert trace[-1] == pytest.approx(mixed.mean(), rel=1e-9, abs=1e-9)


def test_em_finds_best_weight() -> None:
    generator = np.random.default_rng(0)
    log_probs_2N = -generator.gamma(2, 2, (2, 500))
    weights, _ = fit_weights(log_probs_2N)
    grid = np.linspace(0.001, 0.999, 999)
    likelihoods = [np.logaddexp(*(log_probs_2N + np.log([[w], [1 - w]]))).mean() for w in grid]
    assert weights[0] == pytest.approx(grid[int(np.argmax(likelihoods))], abs=0.005)
