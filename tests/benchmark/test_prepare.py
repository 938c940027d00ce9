"""`python -m lm.benchmark what=prepare` on a toy: all figures, error messages."""

import json
from pathlib import Path

import pytest

from lm.benchmark.__main__ import main
from lm.benchmark.prepare import RULES


@pytest.mark.parametrize("rule", ["words", *(pytest.param(r, marks=pytest.mark.slow) for r in RULES if r != "words")])
def test_a_toy_run_prints_a_table_and_writes_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rule: str
) -> None:
    (tmp_path / "text").write_text("Some words, and some more words.\n" * 50)
    arguments = ["what=prepare", f"file={tmp_path / 'text'}", f"rule={rule}", "repeats=1", f"out={tmp_path / 'out'}"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    records = json.loads((tmp_path / "out").read_text())
    assert [record["name"] for record in records] == [
        "prepare/one_core_against_plain",
        "prepare/two_cores_against_one",
        "prepare/peak_memory",
    ]
    assert all(record["name"] in printed for record in records)
    assert records[-1]["value"] > 10
    for way in ("plain", "one core", "two cores"):
        assert f"\n{way} " in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "file must name a text file; got ''"),
        (["file=/nowhere"], "file must name a text file; got '/nowhere'. Try file=PATH"),
        (["file=x", "rule=lines"], "rule must be one of whitespace, spaces, words; got 'lines'"),
        (["file=x", "repeats=0"], "repeats must be at least 1; got 0"),
    ],
)
def test_mistakes_exit_with_two(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["what=prepare", *arguments]) == 2
    assert message in capsys.readouterr().err
