"""The paper's results, and when they are shown."""

import re
from collections.abc import Callable
from dataclasses import asdict

import pytest

from lm.compare.paper import LAYERS, NOTE, published
from lm.compare.plots import draw
from lm.compare.rows import sections
from lm.compare.run_records import Run
from lm.compare.table import as_text
from lm.config.schema import TrainConfig
from lm.config.validate import flatten
from tests.conftest import ROOT


@pytest.fixture
def settings(compose: Callable[..., TrainConfig]) -> Callable[..., dict[str, object]]:
    return lambda *overrides: flatten(asdict(compose(*overrides)))


def header(experiment: str) -> str:
    text = (ROOT / f"conf/experiment/{experiment}.yaml").read_text()
    return " ".join(line.strip("# ") for line in text.splitlines() if line.startswith("#"))


def test_text8_preset_matches_paper(settings) -> None:
    stated = dict(re.findall(r"(\w+) (\d+ / \d+)", header("text8")))
    assert stated.keys() == set(LAYERS)
    for layer in LAYERS:
        cell = published(settings("experiment=text8", f"output={layer}"))
        assert cell is not None
        assert f"{cell.perplexity:g} / {cell.minutes:g}" == stated[layer]


def test_europarl_preset_matches_paper(settings) -> None:
    adaptive, full = header("europarl").split("; full: ")
    for layer, text in (("adaptive", adaptive), ("full", full)):
        for language, stated in re.findall(r"(\w\w) (\d+ / \d+)", text):
            cell = published(settings("experiment=europarl", f"data.language={language}", f"output={layer}"))
            assert cell is not None
            assert f"{cell.perplexity:g} / {cell.minutes:g}" == stated


def test_paper_speed_ups_of_adaptive_are_2_to_10(settings) -> None:
    """As the paper claims."""
    for language in ("bg", "cs", "da", "de", "el", "es"):
        cell = published(settings("experiment=europarl", f"data.language={language}"))
        assert 2 < cell.speed_up < 10
        assert published(settings("experiment=europarl", f"data.language={language}", "output=full")).speed_up == 1


def test_one_billion_word(settings) -> None:
    assert published(settings("experiment=one_billion_word")).perplexity == 43.9
    assert published(settings("experiment=one_billion_word_2_layers")).perplexity == 39.8
    assert published(settings("experiment=one_billion_word", "output=full")) is None


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["experiment=text8_released"],
        ["experiment=one_billion_word_released"],
        ["experiment=europarl_finnish"],
        ["experiment=europarl", "data.language=fr"],
        ["experiment=text8", "model.hidden_size=64"],
        ["experiment=text8", "model.maxent.order=3"],
        ["experiment=text8", "model.dropout=0.1"],
        ["experiment=text8", "output.head_bias=true"],
        ["experiment=text8", "output.shortlist=false"],
        ["experiment=text8", "optim.schedule=linear"],
        ["experiment=text8", "optim.weight_decay=1e-3"],
        ["experiment=text8", "optim.embedding=rowwise"],
        ["experiment=text8", "trainer.average=0.999"],
        ["experiment=text8", "init=runs/OTHER"],
        ["experiment=text8", "optim=adam", "optim.lr=0.1", "optim.schedule=constant"],
        ["experiment=text8", "data.tokenizer=sentencepiece", "data.vocab_size=8000"],
        ["data=text8"],
    ],
)
def test_other_experiments_have_no_paper_result(settings, overrides: list[str]) -> None:
    assert published(settings(*overrides)) is None


def test_none_equals_zero(settings) -> None:
    assert published(settings("experiment=text8", "model.maxent.order=0")) is not None


def test_subset_of_the_corpus_has_no_paper_result(settings) -> None:
    text8 = settings("experiment=text8")
    assert published(text8, vocab_size=44_372) is not None
    assert published(text8, vocab_size=8_671) is None
    greek = settings("experiment=europarl", "data.language=el")
    assert published(greek, vocab_size=106_400) is not None


def test_table_labels_paper_columns(settings, tmp_path) -> None:
    place = {"step": 10, "epoch": 5, "tokens": 1000, "train_seconds": 60.0}
    runs = [
        Run(tmp_path / layer, settings("experiment=text8", f"output={layer}"), [place | {"valid/ppl": 150.0}], None)
        for layer in LAYERS
    ]
    (section,) = sections(runs)
    text = as_text(section)
    assert "speed-up  paper's ppl" in text.splitlines()[1]
    assert NOTE in text
    assert re.search(r"^adaptive \*.* 147$", text, re.M)
    stars = [line for line in draw(section, "time").axes[0].lines if line.get_marker() == "*"]
    assert [line.get_ydata() for line in stars] == [published(run.settings).perplexity for run in runs]
    (other,) = sections([Run(tmp_path, settings(), [place], None)])
    assert "paper" not in as_text(other)
    assert draw(other, "time") is None, "it was never evaluated"
