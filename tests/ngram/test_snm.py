"""Sparse non-negative matrix models versus their definition with dictionaries."""

import math
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from lm.config.schema import Features
from lm.data.text.vocabulary import Vocabulary
from lm.ngram.model import NgramPredictor
from lm.ngram.snm import (
    BUCKETS,
    FeatureType,
    HeldOut,
    SnmModel,
    count_features,
    feature_types,
    train_snm,
    unpack_snm,
)
from lm.system.errors import UserError

WORDS = Vocabulary.from_counts([("a", 40), ("b", 30), ("c", 20), ("d", 10)])
EOS, V = WORDS.eos_id, len(WORDS)


def text(length: int, seed: int) -> np.ndarray:
    """Return a text in which a word depends on the word before it and on an earlier one."""
    generator = np.random.default_rng(seed)
    words = [EOS, 0, 1]
    while len(words) < length:
        likely = (words[-1] + words[-3]) % V
        words.append(likely if generator.random() < 0.6 else int(generator.integers(V)))
    return np.array(words)


def features_of(words: list[int], kind: FeatureType) -> list[tuple[int, ...]]:
    """Return a type's features of the context `words`, by definition; a sentence begins with `</s>`."""
    start = max((place for place, word in enumerate(words) if word == EOS), default=0)
    words, found = words[start:], []
    for skipped in kind.skipped:
        last = len(words) - kind.adjacent - skipped
        if last - kind.remote >= 0:
            remote = words[last - kind.remote : last] if kind.remote else []
            found.append((*remote, *words[len(words) - kind.adjacent :]))
    return found


class SlowCounts:
    """Counts of words after features, in dictionaries."""

    def __init__(self, tokens: list[int], types: list[FeatureType]) -> None:
        self.types = types
        self.rows: dict[tuple[FeatureType, tuple[int, ...]], Counter[int]] = defaultdict(Counter)
        for place, word in enumerate(tokens):
            for kind in types:
                for feature in features_of([EOS, *tokens[:place]], kind):
                    self.rows[kind, feature][word] += 1
        self.rows = {key: row for key, row in self.rows.items() if row.total() >= key[0].min_count}

    def prob(self, word: int, context: list[int]) -> float:
        """Return the probability with all adjustments 0: the mean of the features' relative frequencies."""
        found = [self.rows.get((kind, f)) for kind in self.types for f in features_of([EOS, *context], kind)]
        shares = [row[word] / row.total() for row in found if row is not None]
        return (sum(shares) + 1 / V) / (len(shares) + 1)


def unadjusted(tokens: np.ndarray, features: Features) -> SnmModel:
    table = count_features(tokens, feature_types(features), eos_id=EOS)
    return SnmModel(features, table, table.adjustments()[0], 1.0, vocabulary=WORDS)


def distributions(model: SnmModel, words: list[int]) -> np.ndarray:
    predictor = NgramPredictor(model)
    read, _ = predictor.read(torch.tensor([[EOS], *([word] for word in words)]), predictor.initial_state(1))
    return read.log_prob()[:, 0].exp().numpy()


@pytest.mark.parametrize("features", get_args(Features))
def test_zero_adjustments_give_mean_of_relative_frequencies(features: Features) -> None:
    tokens, held_out = text(250, 0), text(40, 1).tolist()
    slow = SlowCounts(tokens.tolist(), feature_types(features))
    model = unadjusted(tokens, features)
    expected = [[slow.prob(word, held_out[:n]) for word in range(V)] for n in range(len(held_out) + 1)]
    np.testing.assert_allclose(distributions(model, held_out), expected, rtol=1e-10)
    assert model.num_ngrams == sum(len(row) for row in slow.rows.values()) == sum(model.sizes)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("features", get_args(Features))
def test_trained_probabilities_sum_to_one(features: Features, seed: int) -> None:
    model = train_snm(text(900, seed), features, vocabulary=WORDS)
    held_out = text(60, seed + 10)
    probs = distributions(model, held_out.tolist())
    np.testing.assert_allclose(probs.sum(1), 1, atol=1e-9)
    predictor = NgramPredictor(model)
    read, _ = predictor.read(torch.tensor([[EOS], *([word] for word in held_out[:-1])]), predictor.initial_state(1))
    nll = read.nll(torch.from_numpy(held_out)[:, None])[:, 0].numpy()
    np.testing.assert_allclose(np.exp(-nll), probs[np.arange(60), held_out], rtol=1e-9)


def held_out_problem(features: Features) -> tuple[HeldOut, int]:
    tokens, types = text(400, 3), feature_types(features)
    table = count_features(tokens[:350], types, eos_id=EOS)
    return HeldOut.after(table, types, tokens, 350, vocabulary=WORDS), len(types) * BUCKETS**2 + 1


def test_gradient_matches_finite_differences() -> None:
    problem, size = held_out_problem("skip5")
    theta = np.random.default_rng(0).normal(size=size)
    _, gradient = problem.loss_and_gradient(theta, 10, 40)
    largest = np.argsort(-abs(gradient))[:40]
    assert size - 1 in largest, "the uniform feature is checked too"
    for i in largest:
        step = 1e-5 * (np.arange(size) == i)
        losses = [problem.loss_and_gradient(theta + sign * step, 10, 40)[0] for sign in (1, -1)]
        assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(gradient[i], rel=1e-4, abs=1e-6)


def test_held_out_loss_matches_scores() -> None:
    tokens = text(400, 3)
    problem, size = held_out_problem("skip10")
    slow = SlowCounts(tokens[:350].tolist(), feature_types("skip10"))
    expected = -sum(math.log(slow.prob(int(tokens[n]), tokens[:n].tolist())) for n in range(350, 400))
    assert problem.loss_and_gradient(np.zeros(size), 0, 50)[0] == pytest.approx(expected, rel=1e-5)


def test_training_lowers_perplexity() -> None:
    tokens, held_out = text(6000, 5), text(1500, 6)

    def nll(model: SnmModel) -> float:
        predictor = NgramPredictor(model)
        read, _ = predictor.read(torch.tensor([[EOS], *([word] for word in held_out[:-1])]), predictor.initial_state(1))
        return float(read.nll(torch.from_numpy(held_out)[:, None]).mean())

    for features in get_args(Features):
        assert nll(train_snm(tokens, features, vocabulary=WORDS)) < nll(unadjusted(tokens, features))


def test_packed_model_is_restored_and_damage_raises() -> None:
    model = train_snm(text(300, 0), "skip5", vocabulary=WORDS)
    packed = model.pack()
    again = unpack_snm(packed, "skip5", WORDS, path=Path("last.pt"))
    words = text(30, 2).tolist()
    np.testing.assert_array_equal(distributions(again, words), distributions(model, words))
    for name, place, value in [("words", 5, V), ("words", 0, -1), ("starts", 3, 10**6), ("edges", 1, 10**6)]:
        damaged = {key: list(array) if key == "edges" else array for key, array in packed.items()}
        damaged[name] = packed[name].copy() if name == "edges" else packed[name].clone()
        damaged[name][place] = value
        with pytest.raises(UserError, match="damaged"):
            unpack_snm(damaged, "skip5", WORDS, path=Path("last.pt"))


def test_keys_within_each_type_are_sorted_and_distinct() -> None:
    table = count_features(text(500, 0), feature_types("skip10"), eos_id=EOS)
    for first, end in pairwise(table.edges):
        assert (np.diff(table.keys_F[first:end]) > 0).all()


def test_short_text_raises() -> None:
    with pytest.raises(UserError, match="at least 40 training tokens; got 30"):
        train_snm(text(30, 0), "ngram5", vocabulary=WORDS)
