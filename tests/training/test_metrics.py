"""Metrics: JSON lines are the source of truth; TensorBoard events follow them, without duplicates after a resume."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lm.system.errors import UserError
from lm.training.metrics import Metrics, read_metrics
from tests.conftest import without_times


def records(steps: Iterator[int] | range) -> list[dict[str, object]]:
    return [
        {"step": step, "train_seconds": step / 10, "eval_seconds": 0.0, "valid/ppl": 100.0 - step, "speed/step_ms": 1.0}
        for step in steps
    ]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_resume_truncates_metrics_to_checkpoint(tmp_path: Path) -> None:
    first = Metrics(tmp_path, settings={})
    for record in records(range(1, 6)):
        first.write(record)
    position = first.flush()
    for record in records(range(6, 9)):  # lost: no checkpoint was written after them
        first.write(record)
    first.close()
    assert len(read_metrics(tmp_path)) == 8

    second = Metrics(tmp_path, position=position, settings={})
    for record in records(range(6, 11)):
        second.write(record)
    second.close()

    assert [without_times(r) for r in read_metrics(tmp_path)] == [without_times(r) for r in records(range(1, 11))]
    curves = scalars(tmp_path)
    assert curves["1_valid/ppl"] == [(step, 100.0 - step) for step in range(1, 11)]
    seconds = [step for step, _ in curves["1_valid/ppl_by_training_second"]]
    assert len(set(seconds)) == len(seconds) == 10
    assert len(list(tmp_path.glob("events.out.*"))) == 1


@pytest.mark.parametrize("content", [b"{", b"garbage\n", b"\xff\xfe\n", b"3\n", b'{"a": 1}\n'])
def test_invalid_metrics_lines_raise(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(UserError, match="is damaged: line 1 is not a record"):
        Metrics(tmp_path, position=len(content), settings={})


def test_wall_times_survive_a_resume(tmp_path: Path) -> None:
    first = Metrics(tmp_path, settings={})
    first.write(records(range(1, 2))[0])
    position = first.flush()
    first.close()
    written = read_metrics(tmp_path)[0]["time"]
    Metrics(tmp_path, position=position, settings={}).close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert abs(events.Scalars("1_valid/ppl")[0].wall_time - written) < 1e-3


def test_non_json_values_become_null(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, settings={})
    metrics.write({"step": 1, "train_seconds": 0.0, "train/ppl": math.inf, "train/loss": math.nan})
    metrics.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=lambda _: 1 / 0)
    assert line["train/ppl"] is None
    assert line["train/loss"] is None
    assert scalars(tmp_path) == {}


def test_partial_line_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"ste')
    assert read_metrics(tmp_path) == [{"step": 1}]


@pytest.mark.parametrize("line", ['"step"', '["step"]', "1", "null", '{"other": 1}'])
def test_line_that_is_no_record_raises(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(UserError, match="line 2 is not a record"):
        read_metrics(tmp_path)
