"""`lm.load`: next words and scores match word-by-word distributions."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import lm
from lm.inference.api import TrainedModel
from lm.system.errors import UserError
from tests.conftest import Command
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


def test_batches_of_sentences_match_single_ones(loaded: TrainedModel) -> None:
    texts = ["w000002 nonsense", "", "w000001 w000003 w000002 w000001"]
    for text, found in zip(texts, loaded.score(texts), strict=True):
        assert found.tokens == loaded.score(text).tokens
        assert found.log_probs == pytest.approx(loaded.score(text).log_probs, rel=1e-5)


def test_distributions_and_hidden_states(loaded: TrainedModel) -> None:
    ids = loaded.vocabulary.encode(["w000001", "w000003"]).tolist()
    expected = torch.stack(log_distributions(loaded.model, ids, eos_id=loaded.vocabulary.eos_id))
    found = loaded.log_probs("w000001 w000003")
    torch.testing.assert_close(found, expected)
    hidden = loaded.hidden_states("w000001 w000003")
    torch.testing.assert_close((hidden @ loaded.model.output.weight.T).log_softmax(-1), expected)


def test_generated_texts_are_those_of_the_command(loaded: TrainedModel, tiny_run: Path, command: Command) -> None:
    settings = {"samples": 3, "max_words": 6, "seed": 5}
    arguments = [f"{key}={value}" for key, value in settings.items()]
    printed = command("lm/generate.py", f"checkpoint={tiny_run}", "prompt=w000001", *arguments).stdout
    texts = loaded.generate("w000001", **settings)
    assert "".join(f"--- {number} ---\n{text}\n" for number, text in enumerate(texts, 1)) == printed
    assert loaded.generate("w000001", max_words=6, seed=5) == texts[:1]


def test_embed_returns_input_vectors(loaded: TrainedModel) -> None:
    id_ = int(loaded.vocabulary.encode(["w000003"])[0])
    torch.testing.assert_close(loaded.embed(["w000001", "w000003"])[1], loaded.model.input.weight[id_].detach())


def test_tables_convert_to_pandas(loaded: TrainedModel) -> None:
    pandas = pytest.importorskip("pandas")
    assert isinstance(loaded.surprisal("w000001").to_pandas(), pandas.DataFrame)
    assert list(loaded.score("w000001").to_pandas().columns) == ["token", "log_prob"]


BAD = {
    "score": [None, 3, [], ["a", 3], b"w"],
    "surprisal": [None, [], [None]],
    "log_probs": [None, 3],
    "hidden_states": [3],
    "embed": [["nonsense"], "nonsense"],
    "generate": [None, {"samples": 0}, {"temperature": -1}, {"top_p": 2}, {"sampels": 2}, {"seed": "x"}],
    "next_word": [None, {"k": 0}, {"k": 1000}],
}


@pytest.mark.parametrize(("method", "value"), [(method, value) for method, values in BAD.items() for value in values])
def test_bad_input_raises_one_clear_error(loaded: TrainedModel, method: str, value: Any) -> None:
    with pytest.raises(UserError) as error:
        getattr(loaded, method)(**value) if isinstance(value, dict) else getattr(loaded, method)(value)
    assert str(error.value).endswith((".", "?")) and "\n" not in str(error.value)


def test_bad_checkpoint_raises() -> None:
    with pytest.raises(UserError, match="which must be last or best; got 'first'"):
        lm.load("runs/none", which="first")
    with pytest.raises(UserError):
        lm.load("runs/none")
