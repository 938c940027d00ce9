"""Counting and smoothing on sorted arrays versus a dictionary-based reference."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.ngram.kneser_ney import choose_discounts, estimate
from lm.ngram.model import NgramModel, NgramPredictor
from lm.ngram.trie import count_ngrams
from lm.system.errors import UserError
from tests.helpers.ngrams import SlowKneserNey, log_probs

EOS = 0


def counted(
    tokens: list[int], order: int, vocab_size: int, *, modified: bool, min_counts: list[int] | None = None
) -> NgramModel:
    counts = count_ngrams(np.array(tokens, np.uint16), order=order, vocab_size=vocab_size, eos_id=EOS)
    return estimate(counts, modified=modified, min_counts=min_counts or [1] * order, eos_id=EOS)[0]


texts = st.integers(2, 6).flatmap(
    lambda vocab_size: st.tuples(
        st.just(vocab_size),
        st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=80),
        st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=12),
    )
)


@settings(max_examples=60, deadline=None)
@given(texts, st.integers(1, 6), st.booleans(), st.sampled_from([[1], [1, 2], [1, 1, 2], [1, 2, 3]]))
def test_probabilities_match_reference(
    text: tuple[int, list[int], list[int]], order: int, modified: bool, least: list[int]
) -> None:
    vocab_size, train, held_out = text
    min_counts = [*least, *[least[-1]] * order][:order]
    slow = SlowKneserNey(train, order=order, vocab_size=vocab_size, eos=EOS, modified=modified, min_counts=min_counts)
    model = counted(train, order, vocab_size, modified=modified, min_counts=min_counts)
    assert model.trie.is_sound(vocab_size)
    for words in (train[:20], held_out):
        expected = [slow.prob(word, slow.context(words[:place])) for place, word in enumerate(words)]
        assert np.exp(log_probs(model, words)) == pytest.approx(expected, abs=1e-10, rel=1e-10)
    predictor = NgramPredictor(model)
    read, _ = predictor.read(torch.tensor([[EOS], *([word] for word in held_out)]), predictor.initial_state(1))
    probs = read.log_prob().exp()[:, 0]
    assert probs.sum(-1).tolist() == pytest.approx([1] * (len(held_out) + 1), abs=1e-10)
    expected = [[slow.prob(w, slow.context(held_out[:n])) for w in range(vocab_size)] for n in range(len(held_out) + 1)]
    np.testing.assert_allclose(probs.numpy(), expected, atol=1e-10)


def test_counts_respect_sentence_boundaries() -> None:
    text = np.random.default_rng(0).integers(0, 5, 500).tolist()
    counts = count_ngrams(np.array(text), order=4, vocab_size=5, eos_id=EOS)
    slow = SlowKneserNey(text, order=4, vocab_size=5, eos=EOS, modified=True)
    for n in range(1, 5):
        rows = map(tuple, counts.trie.word_ids(n).tolist())
        found = dict(zip(rows, counts.occurrences_M[counts.trie.nodes(n)].tolist(), strict=True))
        assert Counter(found) == slow.occurrences[n]


def test_reading_in_chunks_and_batches_matches_one_pass() -> None:
    generator = np.random.default_rng(1)
    text = generator.integers(0, 9, 400)
    model = counted(text.tolist(), 4, 9, modified=True)
    predictor = NgramPredictor(model)
    words = torch.from_numpy(generator.integers(0, 9, (10, 3)))
    whole, _ = predictor.read(words, predictor.initial_state(3))
    first, state = predictor.read(words[:1], predictor.initial_state(3))
    second, _ = predictor.read(words[1:], state)
    torch.testing.assert_close(torch.cat([first.log_prob(), second.log_prob()]), whole.log_prob())
    alone, _ = predictor.read(words[:, 1:2], predictor.initial_state(1))
    torch.testing.assert_close(alone.log_prob()[:, 0], whole.log_prob()[:, 1])
    torch.testing.assert_close(
        whole.at(torch.tensor([9, 2]), torch.tensor([0, 2])).log_prob()[1], whole.log_prob()[2, 2]
    )


def test_ignored_targets_score_zero() -> None:
    predictor = NgramPredictor(counted([1, 2, 0, 1, 1, 0], 2, 3, modified=False))
    predictions, _ = predictor.read(torch.tensor([[0], [1]]), predictor.initial_state(1))
    nll = predictions.nll(torch.tensor([[-100], [2]]))
    assert nll[0] == 0 and nll[1] > 0


def test_discounts_fall_back_if_not_estimable() -> None:
    many = np.repeat([1, 2, 3, 4], [40, 20, 10, 6])
    (d1, d2, d3), problem = choose_discounts(many, modified=True)
    assert problem is None and (d1, d2, d3) == pytest.approx((0.5, 2 - 1.5 * 0.5, 3 - 2 * 0.6))
    single, problem = choose_discounts(np.repeat([1, 2], [40, 20]), modified=True)
    assert single == (0.5,) * 3 and "using a single one, 0.500" in str(problem)
    assert choose_discounts(many, modified=False) == ((0.5,) * 3, None)
    fixed, problem = choose_discounts(np.array([1, 1, 3]), modified=False)
    assert fixed == (0.5,) * 3 and "1 to 4 times: 2, 0, 1, 0" in str(problem)


def test_unseen_words_share_the_uniform_mass() -> None:
    model = counted([1, 2, 1, 0] * 9, 3, 7, modified=True)
    first = np.exp(model.log_probs_M[:7])
    assert first.sum() == pytest.approx(1, abs=1e-12)
    assert len({round(value, 15) for value in first[3:]}) == 1 and first[3] > 0


def test_empty_text_raises() -> None:
    with pytest.raises(UserError, match="it has 0"):
        count_ngrams(np.array([], np.uint16), order=2, vocab_size=3, eos_id=EOS)


def test_trie_with_out_of_range_indices_is_not_sound() -> None:
    model = counted(np.random.default_rng(0).integers(0, 4, 60).tolist(), 3, 4, modified=True)
    trie = model.trie
    assert trie.is_sound(4) and not trie.is_sound(5)
    for array in (trie.words_M, trie.children_L):
        for place in (0, len(array) // 2, len(array) - 1):
            before = array[place]
            array[place] = 10**6
            assert not trie.is_sound(4)
            array[place] = before
    assert math.isfinite(model.log_probs_M.sum())
