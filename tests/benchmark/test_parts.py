"""`what=cores` and `what=inputs` on toys: every core and input has its row."""

import json
from pathlib import Path

import pytest

from lm.benchmark import measure
from lm.benchmark.__main__ import main
from lm.config.registry import plugin_names
from tests.helpers.forks import CONTEXT

TOY = ["vocab=300", "cutoffs=20,100", "embedding=8", "width=16", "streams=4", "bptt=5", "repeats=1"]


@pytest.mark.parametrize(
    ("what", "group"), [pytest.param("cores", "model", marks=pytest.mark.slow), ("inputs", "input")]
)
def test_a_toy_run_prints_a_table_and_writes_records(
    what: str, group: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure.multiprocessing, "get_context", lambda _: CONTEXT)  # started sooner than by `spawn`
    out = tmp_path / "benchmark.json"
    assert main([f"what={what}", *TOY, f"out={out}"]) == 0
    printed = capsys.readouterr().out
    records = {record["name"]: record for record in json.loads(out.read_text())}
    for name in plugin_names(group):
        assert f"\n{name} " in printed
        assert records[f"{what}/{name}/step"]["value"] > 0
    compared = "cores/gru/core" if what == "cores" else "inputs/adaptive/parameters"
    assert records[compared]["ratio"] > 0
