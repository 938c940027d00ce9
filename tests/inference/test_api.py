"""`lm.load`: next words and scores match word-by-word distributions."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import lm
from lm.inference.api import TrainedModel
from lm.inference.surprisal import COLUMNS
from lm.system.errors import UserError
from tests.conftest import Command
from tests.helpers.models import loaded_model, log_distributions, small_ngrams


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
    assert repr(score).startswith("TextScore('w000002 <unk> </s>', log_prob=-")


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
    assert loaded.generate("w000001", max_words=np.int64(6), seed=np.int64(5)) == texts[:1]


def test_embed_returns_input_vectors(loaded: TrainedModel) -> None:
    id_ = int(loaded.vocabulary.encode(["w000003"])[0])
    torch.testing.assert_close(loaded.embed(["w000001", "w000003"])[1], loaded.model.input.weight[id_].detach())


def test_tables_convert_to_pandas(loaded: TrainedModel) -> None:
    table, score = loaded.surprisal(["w000001 never", "w000002"]), loaded.score("w000001 never")
    frame = table.to_pandas()
    assert isinstance(frame, pandas.DataFrame) and list(frame.columns) == COLUMNS
    assert frame.surprisal.dtype == frame.entropy.dtype == frame.entropy_reduction.dtype == "float64"
    assert frame.surprisal.tolist() == [token.surprisal for token in table]
    assert frame.entropy_reduction.isna().tolist() == [token.token == "</s>" for token in table]
    assert frame.unknown.tolist() == [0, 1, 0, 0, 0]
    of_sentence = frame.groupby("sentence_id").surprisal.sum() * math.log(2)
    assert of_sentence[1] == pytest.approx(-score.log_prob, abs=1e-5)
    column = pandas.DataFrame({"sentence": ["w000001 never", "w000002"]}, index=[7, 3]).sentence
    assert loaded.surprisal(column) == table and len(loaded.score(column)) == 2
    assert score.to_pandas().to_dict("list") == {"token": score.tokens, "log_prob": score.log_probs}


BAD = {
    "score": [None, 3, [], ["a", 3], b"w"],
    "surprisal": [
        *[None, [], [None], pandas.DataFrame({"sentence": ["w000001"]}), pandas.Series([1.5]), iter("a")],
        *[{"adapt": "yes"}, {"adapt": None}, {"dynamic_lr": 0.1}, {"adapt": True, "dynamic_lr": -1}],
        *[{"adapt": True, "dynamic_lr": "high"}, {"adapt": True, "dynamic_lr": math.nan}],
    ],
    "log_probs": [None, 3, ["w000001", "w000002"]],
    "hidden_states": [3, ["w000001"]],
    "embed": [["nonsense"], "nonsense", [], None, ""],
    "generate": [
        *[None, ["w000001"], "nonsense", {"samples": 0}, {"temperature": -1}, {"top_p": 2}, {"sampels": 2}],
        *[{"seed": "x"}, {"mix": ["runs/x"]}, {"device": "cpu"}, {"checkpoint": "runs/x"}],
    ],
    "next_word": [None, ["w000001"], {"k": 0}, {"k": 1000}, {"k": 2.5}, {"k": "5"}, {"k": 3 + 0j}],
    "load": [
        *["runs/none", "x" * 300, "", None, 3, {"path": "RUN", "which": "first"}, {"path": "RUN", "which": None}],
        *[{"path": "RUN", "device": "gpu"}, {"path": "RUN", "device": None}, {"path": "RUN", "verify": "yes"}],
    ],
}


@pytest.mark.parametrize(("method", "value"), [(method, value) for method, values in BAD.items() for value in values])
def test_bad_input_raises_one_clear_error(loaded: TrainedModel, tiny_run: Path, method: str, value: Any) -> None:
    call = lm.load if method == "load" else getattr(loaded, method)
    if isinstance(value, dict) and "path" in value:
        value = {**value, "path": tiny_run}
    if isinstance(value, dict) and method == "surprisal":
        value = {**value, "sentences": "w000001"}
    with pytest.raises(UserError) as error:
        call(**value) if isinstance(value, dict) else call(value)
    assert str(error.value).endswith((".", "?")) and "\n" not in str(error.value)


def test_count_models_have_no_vectors() -> None:
    counts = TrainedModel(loaded_model(small_ngrams()))
    for ask in (counts.hidden_states, counts.embed):
        with pytest.raises(UserError, match="needs a neural model; got a model"):
            ask("w1")
    assert counts.log_probs("w1 w2").exp().sum(-1).tolist() == pytest.approx([1] * 3, abs=1e-5)
