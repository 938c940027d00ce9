"""The Zipfian source follows its definition, and its true perplexity is exact."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data.corpora.zipf import ZipfConfig, ZipfSource
from lm.data.corpus import open_corpus
from lm.data.source import SPLITS
from lm.data.text.vocabulary import EOS, UNK

SIZES = st.one_of(st.integers(16, 300), st.integers(301, 5000))
SEEDS = st.integers(0, 2**70)


def word_transitions(source: ZipfSource) -> np.ndarray:
    """p(next | word) for all pairs of words, from the definition."""
    return source.transitions[np.ix_(source.class_of, source.class_of)] * source.within[None, :]


def entropy(probabilities: np.ndarray) -> float:
    return -sum(p * math.log(p) for p in probabilities.ravel().tolist() if p > 0)


@settings(max_examples=12, deadline=None)
@given(st.integers(16, 120), SEEDS)
def test_true_perplexity_equals_brute_force(vocab_size: int, seed: int) -> None:
    source = ZipfSource.build(vocab_size=vocab_size, seed=seed)
    matrix = word_transitions(source)
    assert np.allclose(matrix.sum(1), 1)
    # The stationary distribution: the left eigenvector of eigenvalue 1, by solving for it.
    system = np.vstack([matrix.T - np.eye(vocab_size), np.ones(vocab_size)])
    stationary = np.linalg.lstsq(system, np.append(np.zeros(vocab_size), 1.0), rcond=None)[0]
    rate = sum(p * entropy(row) for p, row in zip(stationary.tolist(), matrix, strict=True))
    assert source.true_perplexity == pytest.approx(math.exp(rate), rel=1e-9)
    assert source.unigram_perplexity == pytest.approx(math.exp(entropy(stationary)), rel=1e-9)
    # Words are numbered by true rank.
    assert (np.diff(stationary) <= 1e-12).all()
    # Every word can be reached from every other, so the perplexity is that of every text.
    assert (np.linalg.matrix_power(source.transitions, 64) > 0).all()


@settings(max_examples=200, deadline=None)
@given(SIZES, SEEDS)
def test_unigram_perplexity_is_at_least_twice_the_true_one(vocab_size: int, seed: int) -> None:
    source = ZipfSource.build(vocab_size=vocab_size, seed=seed)
    assert 1 < source.true_perplexity <= source.unigram_perplexity / 2


@settings(max_examples=50, deadline=None)
@given(SIZES, SEEDS)
def test_frequencies_within_a_class_fall_as_one_over_rank(vocab_size: int, seed: int) -> None:
    source = ZipfSource.build(vocab_size=vocab_size, seed=seed)
    for number in range(8):
        within = source.within[source.class_of == number]
        assert within.sum() == pytest.approx(1)
        assert np.allclose(within * np.arange(1, len(within) + 1), within[0])


@pytest.mark.parametrize("vocab_size", [16, 203, 5000])
def test_long_text_has_the_true_cross_entropy(vocab_size: int) -> None:
    source = ZipfSource.build(vocab_size=vocab_size, seed=vocab_size)
    words = np.concatenate(list(source.draw(1_500_000, np.random.default_rng(0))))
    assert len(words) == 1_500_000
    classes = source.class_of[words]
    losses = -np.log(source.transitions[classes[:-1], classes[1:]] * source.within[words[1:]])
    # Five standard errors of the mean; the losses are nearly independent.
    margin = 5 * losses.std() / math.sqrt(len(losses))
    assert losses.mean() == pytest.approx(math.log(source.true_perplexity), abs=margin)
    expected = len(words) * source.within / 8
    observed = np.bincount(words, minlength=vocab_size)
    assert np.abs(observed - expected).max() < 8 * math.sqrt(expected.max())


def test_vocabulary_contains_every_word(tmp_path: Path) -> None:
    corpus = open_corpus(ZipfConfig(root=str(tmp_path), vocab_size=5000, tokens=3005, seed=7))
    words = corpus.vocabulary.words
    assert set(words) == {UNK, EOS, *(f"w{number:06d}" for number in range(5000))}
    assert [len(corpus.split(split)) for split in SPLITS] == [3005, 300, 300]
    counts = np.bincount(corpus.split("train"), minlength=5002)
    assert np.array_equal(counts, corpus.vocabulary.counts)
    assert counts[corpus.vocabulary.eos_id] == counts[corpus.vocabulary.unk_id] == 0
    assert (counts == 0).sum() > 100  # the sample lacks many words
    source = ZipfSource.build(vocab_size=5000, seed=7)
    assert corpus.true_perplexity == source.true_perplexity
    assert corpus.meta["unigram_perplexity"] == source.unigram_perplexity


def test_prepared_text_follows_the_source(tmp_path: Path) -> None:
    corpus = open_corpus(ZipfConfig(root=str(tmp_path), vocab_size=50, tokens=100_000, seed=3))
    source = ZipfSource.build(vocab_size=50, seed=3)
    for split in SPLITS:
        numbers = np.array([int(word[1:]) for word in corpus.vocabulary.decode(corpus.split(split))])
        classes = source.class_of[numbers]
        losses = -np.log(source.transitions[classes[:-1], classes[1:]] * source.within[numbers[1:]])
        assert math.exp(losses.mean()) == pytest.approx(source.true_perplexity, rel=0.05)


def test_text_depends_only_on_the_seed(tmp_path: Path) -> None:
    def text(root: str, seed: int) -> bytes:
        return (
            open_corpus(ZipfConfig(root=str(tmp_path / root), vocab_size=64, tokens=2000, seed=seed))
            .split("train")
            .tobytes()
        )

    assert text("one", 1) == text("two", 1) != text("one", 2)


def test_splits_differ(tmp_path: Path) -> None:
    corpus = open_corpus(ZipfConfig(root=str(tmp_path), vocab_size=64, tokens=2000, seed=1))
    texts = [corpus.split(split)[:200].tobytes() for split in SPLITS]
    assert len(set(texts)) == 3
