"""Exchange clustering maximizes mutual information, is deterministic, and is cached."""

from collections import Counter
from itertools import pairwise
from math import log

import numpy as np
import pytest

from lm.data.brown import brown_classes, count_pairs, exchange


def information(tokens, classes) -> float:
    """Compute the mutual information of adjacent classes by definition."""
    pairs = Counter(zip((classes[t] for t in tokens[:-1]), (classes[t] for t in tokens[1:]), strict=True))
    total = sum(pairs.values())
    first, second = Counter(), Counter()
    for (a, b), n in pairs.items():
        first[a] += n
        second[b] += n
    return sum(n / total * log(n * total / (first[a] * second[b])) for (a, b), n in pairs.items())


@pytest.fixture
def corpus():
    """A text of 12 words in 3 hidden classes that mostly follow each other in a cycle."""
    random = np.random.default_rng(5)
    state, hidden, tokens = 0, random.permutation(np.arange(12) % 3), []
    for _ in range(4000):
        state = (state + 1) % 3 if random.random() < 0.9 else random.integers(3)
        tokens.append(random.choice(np.flatnonzero(hidden == state)))
    return np.array(tokens, dtype=np.uint16), hidden


def run(tokens, vocab_size, num_classes):
    followers, predecessors = count_pairs(tokens, vocab_size=vocab_size)
    return list(exchange(followers, predecessors, num_classes=num_classes)), followers


def test_hidden_classes_are_recovered(corpus):
    tokens, hidden = corpus
    passes, _ = run(tokens, 12, 3)
    assert len(set(zip(hidden.tolist(), passes[-1].tolist(), strict=True))) == 3


def test_objective_never_decreases(corpus):
    tokens, _ = corpus
    passes, _ = run(tokens, 12, 4)
    values = [information(tokens.tolist(), classes.tolist()) for classes in passes]
    assert all(a <= b + 1e-12 for a, b in pairwise(values))


def test_no_single_move_improves_the_result():
    tokens = np.random.default_rng(1).integers(0, 8, 300) // np.random.default_rng(2).integers(1, 3, 300)
    passes, _ = run(tokens, 8, 3)
    final = passes[-1].tolist()
    reached = information(tokens.tolist(), final)
    for word in range(8):
        for other in range(3):
            moved = [other if w == word else c for w, c in enumerate(final)]
            if len(set(moved)) == 3:
                assert information(tokens.tolist(), moved) <= reached + 1e-12


def test_pair_counts_do_not_depend_on_chunks(corpus, monkeypatch):
    tokens, _ = corpus
    whole = count_pairs(tokens, vocab_size=12)
    monkeypatch.setattr("lm.data.brown.CHUNK_TOKENS", 77)
    for a, b in zip(whole, count_pairs(tokens, vocab_size=12), strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    followers = whole[0]
    expected = Counter(zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True))
    first = np.repeat(np.arange(12), np.diff(followers.start_V))
    found = dict(
        zip(zip(first.tolist(), followers.word_P.tolist(), strict=True), followers.count_P.tolist(), strict=True)
    )
    assert found == expected


@pytest.mark.parametrize(("tokens", "vocab_size", "num_classes"), [([], 5, 3), ([0], 1, 1), ([2, 2, 2], 4, 4)])
def test_tiny_texts_leave_no_class_empty(tokens, vocab_size, num_classes):
    passes, _ = run(np.array(tokens, dtype=np.uint16), vocab_size, num_classes)
    assert set(passes[-1].tolist()) == set(range(num_classes))


def test_cache_is_keyed_by_corpus_and_classes(corpus, tmp_path, capsys):
    tokens, _ = corpus

    def classes(text=tokens, num_classes=3, corpus_hash="a" * 64):
        keys = {"cache_dir": tmp_path / "cache", "corpus_hash": corpus_hash}
        return brown_classes(text, vocab_size=12, num_classes=num_classes, **keys)

    first = classes()
    assert " s, kept in " in capsys.readouterr().out
    assert np.array_equal(classes(text=tokens[:0]), first)  # from the file: the text is not read again
    assert "from" in capsys.readouterr().out
    classes(num_classes=4)
    classes(corpus_hash="b" * 64)
    assert len(list((tmp_path / "cache").iterdir())) == 3
    for file in (tmp_path / "cache").iterdir():
        file.write_bytes(file.read_bytes()[:40])
    assert np.array_equal(classes(), first)
