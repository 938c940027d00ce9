"""`python -m lm.benchmark what=distributed` on a toy: real processes, every figure, mistakes in one sentence."""

import json
from pathlib import Path

import pytest

from lm.benchmark.__main__ import main

TOY = ["what=distributed", "vocab=300", "cutoffs=20,100", "width=16", "embedding=8", "tokens=40", "repeats=1"]


@pytest.mark.slow
def test_a_toy_run_prints_a_table_and_writes_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "benchmark.json"
    assert main([*TOY, "steps=2", "table=5000", f"out={out}"]) == 0
    printed = capsys.readouterr().out
    records = {record["name"]: record for record in json.loads(out.read_text())}
    assert list(records) == [
        "distributed/300/2_threads",
        "distributed/300/2_processes_against_threads",
        "distributed/5000/dense_exchange",
        "distributed/5000/row_exchange_against_dense",
        "distributed/dense_exchange",
        "distributed/row_exchange",
        "distributed/agreement",
    ]
    assert all(name in printed and record["value"] > 0 for name, record in records.items())
    each = {name: record["value"] for name, record in records.items()}
    alone, together = each["distributed/300/2_threads"], each["distributed/300/2_processes_against_threads"]
    assert records["distributed/300/2_processes_against_threads"]["ratio"] == pytest.approx(together / alone)
    megabytes = 5000 * 8 * 4 / 1e6
    assert each["distributed/dense_exchange"] == pytest.approx(each["distributed/5000/dense_exchange"] / megabytes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tokens=50"], "tokens must be a multiple of 20 times ranks (2); got 50. Try tokens=40"),
        (["ranks=0"], "ranks must be at least 1; got 0"),
        (["vocab=90"], "output.cutoffs must increase"),
        (["streams=3"], "streams is not a setting of this benchmark"),
    ],
    ids=str,
)
def test_mistakes_are_reported(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TOY, *arguments]) == 2
    assert message in capsys.readouterr().err
