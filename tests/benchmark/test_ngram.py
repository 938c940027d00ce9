"""`python -m lm.benchmark what=ngram` on a toy: all figures, error messages."""

import json
from pathlib import Path

import pytest

from lm.benchmark import ngram
from lm.benchmark.__main__ import main
from lm.benchmark.ngram import NgramSettings, measure
from lm.data.corpus import Corpus
from tests.conftest import run_command


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    run_command(folder, "lm/prepare.py", "data=zipf", "data.vocab_size=30", "data.tokens=2000")
    return next((folder / "data").iterdir())


class Here:
    """A pool that works in this process."""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, work: object, settings: NgramSettings) -> "Here":
        assert work is measure
        self.found = measure(settings)
        return self

    def result(self) -> dict[str, float]:
        return self.found


def test_a_toy_run_prints_a_table_and_writes_records(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ngram, "ProcessPoolExecutor", Here)
    assert main(["what=ngram", f"corpus={corpus}", "order=3", f"out={tmp_path / 'out'}"]) == 0
    printed = capsys.readouterr().out
    records = {record["name"]: record["value"] for record in json.loads((tmp_path / "out").read_text())}
    assert all(name in printed and value > 0 for name, value in records.items())
    assert records["ngram/count_and_estimate"] == pytest.approx(records["ngram/count"] + records["ngram/estimate"])
    assert f"{len(Corpus.open(corpus).split('train')):,} tokens" in printed and "validation perplexity" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "corpus must name the folder of a prepared corpus; got ''"),
        (["corpus={corpus}", "order=10"], "order must be at most 9; got 10"),
        (["corpus={corpus}", "discount=none"], "discount must be one of single, modified; got 'none'"),
        (["corpus=/"], "must be a corpus prepared by this version"),
    ],
)
def test_mistakes_exit_with_two(
    arguments: list[str], message: str, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["what=ngram", *(word.format(corpus=corpus) for word in arguments)]) == 2
    assert message in capsys.readouterr().err
