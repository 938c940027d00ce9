"""Caches versus a word-by-word reference."""

import math
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import torch

from lm.config.inference import CacheKind
from lm.config.schema import TrainConfig
from lm.inference.cache import Cached, CacheSettings, trials_table, try_caches
from lm.inference.dynamic import Dynamic, DynamicSettings
from lm.inference.mixture import Mixture
from lm.inference.unnormalized import Unnormalized
from lm.model.inputs.char_cnn import CharCNN
from lm.model.language_model import LanguageModel, build_model
from lm.model.predictor import Predictor
from tests.helpers.models import VOCABULARY, log_distributions, reading, score_tokens, small_model, small_ngrams

EOS, SIZE = VOCABULARY.eos_id, len(VOCABULARY)
TEXT: list[int] = np.random.default_rng(3).integers(0, SIZE, 40).tolist()
UNIGRAM = [CacheSettings("unigram", size, decay, 0.2) for size in (1, 5, 100) for decay in (1.0, 0.7)]
CONTINUOUS = [CacheSettings("continuous", size, theta, 0.3) for size in (1, 6, 100) for theta in (0.0, 0.8)]
BOUNDED = [CacheSettings(kind, 20, 0.9, 0.4, boundary=2) for kind in get_args(CacheKind)]


@pytest.fixture
def neural(tiny: Callable[..., TrainConfig]) -> LanguageModel:
    return small_model(tiny)


@torch.no_grad()
def defined(model: LanguageModel, settings: CacheSettings) -> list[list[float]]:
    """Reference: distributions after `</s>` and after each word of the text, following the papers' equations."""
    own = [values.exp().tolist() for values in log_distributions(model, TEXT)]
    read = [EOS, *TEXT]
    hidden = model(torch.tensor(read)[:, None], model.initial_state(1))[0][:, 0].double()
    found = []
    for now in range(len(read)):
        shares = [0.0] * SIZE
        for place in range(now + 1):
            if place <= now - settings.size or settings.boundary in read[place : now + 1]:
                continue
            if settings.kind == "unigram":
                shares[read[place]] += settings.sharpness ** (now - place)
            elif place > 0:
                shares[read[place]] += math.exp(settings.sharpness * float(hidden[now] @ hidden[place - 1]))
        total, weight = sum(shares), settings.weight
        mixed = (
            [(1 - weight) * p + weight * share / total for p, share in zip(own[now], shares, strict=True)]
            if total
            else own[now]
        )
        found.append(mixed)
    return found


@pytest.mark.parametrize("settings", [*UNIGRAM, *CONTINUOUS, *BOUNDED], ids=str)
@torch.no_grad()
def test_cache_matches_reference(neural: LanguageModel, settings: CacheSettings) -> None:
    cached, expected = Cached(neural, settings), np.array(defined(neural, settings))
    words = torch.tensor([EOS, *TEXT])[:, None].repeat(1, 2)
    words[:, 0] = words[:, 0].flip(0)  # a different text in the same batch
    state, first = cached.initial_state(2), 0
    targets = torch.tensor([*TEXT, 3])[:, None].expand(-1, 2)
    for end in (1, 2, 17, 18, 41):  # read in parts
        predictions, state = cached.read(words[first:end], state)
        log_probs = predictions.log_prob()[:, 1]
        np.testing.assert_allclose(log_probs.exp(), expected[first:end], rtol=1e-4, atol=1e-6)
        assert log_probs.exp().sum(-1).tolist() == pytest.approx([1] * (end - first), abs=1e-5)
        nll = predictions.nll(targets[first:end])[:, 1]
        torch.testing.assert_close(nll, -log_probs.gather(1, targets[first:end, 1:])[:, 0], rtol=1e-5, atol=1e-6)
        last = predictions.at(torch.tensor([end - first - 1]), torch.tensor([1]))
        np.testing.assert_allclose(last.topk(2)[0][0].exp(), np.sort(expected[end - 1])[::-1][:2], rtol=1e-4)
        first = end


@pytest.mark.parametrize("kind", get_args(CacheKind))
def test_grid_search_predicts_cache_scores(neural: LanguageModel, kind: CacheKind) -> None:
    text = np.random.default_rng(4).integers(0, SIZE, 300)
    mixture = Mixture([neural, small_ngrams()], [0.5, 0.5])
    choices = [CacheSettings(kind, size, sharpness, 0.9) for size in (3, 150) for sharpness in (0.5, 1.0)]
    trials = try_caches(mixture, text, choices, tune=True, **reading())
    assert len(trials) == 4
    for tried, found in trials.items():
        cached = Cached(mixture, tried)
        assert cached.looks_back == tried.size
        result = score_tokens(cached, text)
        assert found == pytest.approx(result.perplexity, rel=1e-5)
        worse = try_caches(mixture, text, choices, tune=False, **reading())
        assert min(worse.values()) > min(trials.values())
    assert trials_table(trials).count("best") == 1


@pytest.mark.parametrize("wrapper", ["cached", "mixture", "dynamic", "unnormalized"])
@torch.no_grad()
def test_words_are_computed_once_after_tuning(tiny: Callable[..., TrainConfig], wrapper: str) -> None:
    """A wrapper is in evaluation mode, so scoring with it leaves its model there, and word vectors are kept."""
    model = build_model(tiny("input=char_cnn", "output=self_normalized"), VOCABULARY).eval()
    assert isinstance(model.input, CharCNN)
    text = np.arange(60) % SIZE
    settings = DynamicSettings("sgd", 0.1, 0.0, 30)
    wrapped: Predictor = {
        "cached": lambda: Cached(model, UNIGRAM[0]),
        "mixture": lambda: Mixture([model, small_ngrams()], [0.5, 0.5]),
        "dynamic": lambda: Dynamic(model, settings),
        "unnormalized": lambda: Unnormalized(model, text, eos_id=EOS, name="a model"),
    }[wrapper]()
    score_tokens(wrapped, text)  # tuning
    calls = CallCounter(model.input.vectors)
    model.input.vectors = calls  # type: ignore[method-assign]
    for _ in range(5):
        model.read(torch.arange(SIZE)[:, None], model.initial_state(1))
    assert calls.number == 1


class CallCounter:
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self.function, self.number = function, 0

    def __call__(self, *arguments: torch.Tensor) -> torch.Tensor:
        self.number += 1
        return self.function(*arguments)


def test_all_streams_see_a_full_cache() -> None:
    """For any number of streams, the cache holds the words before each position."""
    text = np.random.default_rng(5).integers(0, SIZE, 900)
    cached = Cached(small_ngrams(), CacheSettings("unigram", 300, 0.99, 0.2))
    one, many = (score_tokens(cached, text, streams=n, batch_size=4) for n in (1, 7))
    assert one.perplexity == pytest.approx(many.perplexity, rel=1e-12)


def test_ignored_targets_score_zero() -> None:
    cached = Cached(small_ngrams(), UNIGRAM[0])
    predictions, _ = cached.read(torch.tensor([[EOS], [1]]), cached.initial_state(1))
    assert predictions.nll(torch.tensor([[-100], [1]]))[0] == 0
