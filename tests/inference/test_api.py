"""`lm.load`: next words and scores match word-by-word distributions."""

import math
from pathlib import Path

import pytest

import lm
from lm.inference.api import TrainedModel
from tests.helpers.models import log_distributions


@pytest.fixture(scope="module")
def loaded(tiny_run: Path) -> TrainedModel:
    return lm.load(tiny_run)


def test_next_word_returns_most_likely_words(loaded: TrainedModel) -> None:
    ids = loaded.vocabulary.encode(["w000001", "w000003"]).tolist()
    expected = log_distributions(loaded.model, ids, eos_id=loaded.vocabulary.eos_id)[-1].exp().topk(4)
    found = loaded.next_word("w000001 w000003", k=4)
    assert [word for word, _ in found] == loaded.vocabulary.decode(expected.indices.tolist())
    assert [p for _, p in found] == pytest.approx(expected.values.tolist(), rel=1e-5)
    assert len(loaded.next_word()) == 5, "an empty text is the beginning of a sentence"


def test_score_covers_each_word_and_sentence_end(loaded: TrainedModel) -> None:
    ids = loaded.vocabulary.encode(["w000002", "nonsense", "</s>"]).tolist()
    distributions = log_distributions(loaded.model, ids[:-1], eos_id=loaded.vocabulary.eos_id)
    expected = [float(d[word]) for d, word in zip(distributions, ids, strict=True)]
    score = loaded.score("w000002 nonsense")
    assert score.tokens == ["w000002", "<unk>", "</s>"]
    assert score.log_probs == pytest.approx(expected, rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(-sum(expected) / 3), rel=1e-5)


def test_repr_describes_the_model(loaded: TrainedModel) -> None:
    assert "output=full" in repr(loaded) and "32 words" in repr(loaded)
    assert not loaded.model.training
