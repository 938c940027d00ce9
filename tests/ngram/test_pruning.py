"""Relative-entropy pruning versus distributions computed in full, and back-offs that make probabilities sum to one."""

from pathlib import Path

import numpy as np
import pytest

from lm.data.text.vocabulary import Vocabulary
from lm.ngram.arpa import read_arpa, write_arpa
from lm.ngram.kneser_ney import estimate, prune, pruned, relative_entropies, renormalized
from lm.ngram.model import NgramModel
from lm.ngram.trie import count_ngrams
from tests.helpers.ngrams import SlowArpa

WORDS = Vocabulary.from_counts([("a", 40), ("b", 30), ("c", 20), ("d", 10)])
EOS, V = WORDS.eos_id, len(WORDS)


def counted(order: int, *, length: int = 300) -> NgramModel:
    tokens = np.random.default_rng(0).choice(V, length, p=np.array([6, 5, 4, 2, 2, 1]) / 20)
    counts = count_ngrams(tokens, order=order, vocab_size=V, eos_id=EOS)
    return estimate(counts, modified=False, min_counts=[1] * order, eos_id=EOS)[0]


def contexts(order: int, *, number: int = 200) -> np.ndarray:
    return np.random.default_rng(1).integers(0, V, (number, order - 1))


def test_back_offs_of_a_normalized_model_do_not_change() -> None:
    model = counted(4)
    again = renormalized(model.trie, np.exp(model.log_probs_M), eos_id=EOS)
    np.testing.assert_allclose(again.distributions(contexts(4)), model.distributions(contexts(4)), atol=1e-9)


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_renormalized_probabilities_sum_to_one(scale: float) -> None:
    model = counted(4)
    probs = np.exp(model.log_probs_M) * np.random.default_rng(2).uniform(0.1, 1, len(model.log_probs_M)) * scale
    again = renormalized(model.trie, probs, eos_id=EOS)
    np.testing.assert_allclose(np.exp(again.distributions(contexts(4))).sum(1), 1, atol=1e-6)


@pytest.mark.parametrize("order", [2, 3])
def test_criterion_is_relative_entropy_of_the_distributions(order: int) -> None:
    """Removes each n-gram of the highest order alone, and compares the full distributions after its context."""
    model = counted(order, length=120)
    found, rows = relative_entropies(model, order), model.trie.word_ids(order)
    for number, words in enumerate(rows.tolist()):
        kept_M = np.ones(len(model.trie.words_M), bool)
        kept_M[model.trie.nodes(order).start + number] = False
        trie, probs_M, _ = pruned(model.trie, kept_M, np.exp(model.log_probs_M), model.log_back_offs_L)
        without = renormalized(trie, probs_M, eos_id=EOS)
        recent = np.array([words[-2::-1]])
        log_p, log_q = model.distributions(recent)[0], without.distributions(recent)[0]
        log_joint = sum(  # of the context's words
            float(model.distributions(np.array([words[:i][::-1] + [-1] * (order - 1 - i)]))[0, words[i]])
            for i in range(order - 1)
        )
        expected = np.exp(log_joint) * (np.exp(log_p) * (log_p - log_q)).sum()
        assert found[number] == pytest.approx(expected, abs=1e-9, rel=1e-6)


def test_pruned_model_sums_to_one_and_survives_arpa(tmp_path: Path) -> None:
    model, sizes = counted(4), list[int]()
    for threshold in (0, 1e-4, 1e-3, 1e-2, 10):
        smaller = prune(model, threshold)
        sizes.append(smaller.num_ngrams)
        assert smaller.trie.is_sound(V) and smaller.sizes[0] == V
        np.testing.assert_allclose(np.exp(smaller.distributions(contexts(4))).sum(1), 1, atol=1e-6)
        write_arpa(smaller, WORDS, tmp_path / "pruned.arpa")
        again = read_arpa(tmp_path / "pruned.arpa", WORDS)
        np.testing.assert_allclose(again.distributions(contexts(4)), smaller.distributions(contexts(4)), atol=1e-5)
    assert sizes == sorted(sizes, reverse=True) and sizes[0] <= model.num_ngrams and sizes[-1] == V
    assert len(set(sizes)) == 5


def test_independent_reader_gets_same_probabilities(tmp_path: Path) -> None:
    smaller = prune(counted(3), 1e-3)
    write_arpa(smaller, WORDS, tmp_path / "pruned.arpa")
    slow = SlowArpa((tmp_path / "pruned.arpa").read_text())
    for first, second in [("a", "b"), ("b", "c"), ("<s>", "a"), ("d", "d")]:
        recent = np.array([[WORDS.ids[second], EOS if first == "<s>" else WORDS.ids[first]]])
        expected = [slow.log_prob(first, second, word) for word in WORDS.words]
        assert smaller.distributions(recent)[0] / np.log(10) == pytest.approx(expected, abs=1e-5)
