"""Kept figures: the same tables from a few small files, without a trace of the machine."""

import json
import shutil
from pathlib import Path

import pytest

from lm.compare.__main__ import main


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_run, tmp_path / "runs/one"))


def records(folder: Path) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads((folder / "comparison.json").read_text())
    return [{key: value for key, value in row.items() if key != "folders"} for row in rows]


def test_kept_figures_give_the_same_table(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm.compare.can_plot", lambda: False)  # drawing takes most of the time
    kept = tmp_path / "kept"
    assert main([str(run), "--out", str(tmp_path / "a"), "--keep", str(kept)]) == 0
    assert "The figures of 1 run are in" in capsys.readouterr().out
    assert main([str(kept), "--out", str(tmp_path / "b")]) == 0
    (before,), (after,) = records(tmp_path / "a"), records(tmp_path / "b")
    for key, value in before.items():
        assert after[key] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), key
    files = sorted(file.name for file in (kept / "one").iterdir())
    assert files == ["config.yaml", "metrics.jsonl.gz", "run.json", "summary.json"]


def test_places_and_the_machines_name_are_left_out(run: Path, tmp_path: Path) -> None:
    start = {
        "command": f"python train.py seed=2 run_dir={tmp_path}/x data.root={tmp_path}/data",
        "folder": str(tmp_path),
        "host": "somebodys-box",
        "ranks": 1,
    }
    (run / "run.json").write_text(json.dumps({"starts": [start]}))
    kept = tmp_path / "kept"
    assert main([str(run), "--out", str(tmp_path / "a"), "--keep", str(kept)]) == 0
    text = "".join((kept / "one" / name).read_text() for name in ("config.yaml", "run.json", "summary.json"))
    assert str(tmp_path) not in text
    assert "somebodys-box" not in text
    assert "python train.py seed=2" in text


def test_what_cannot_be_kept_is_said(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep = ["--out", str(tmp_path / "a"), "--keep", str(tmp_path / "kept")]
    shutil.copytree(run, tmp_path / "runs/deep/one")
    assert main([str(run), str(tmp_path / "runs/deep/one"), *keep]) == 2
    assert "Two of the runs are named one" in capsys.readouterr().err
    (run / "summary.json").unlink()
    assert main([str(run), *keep]) == 2
    assert "is not finished" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [b"", b"no gzip", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff\x00"])
def test_damaged_figures_are_said_to_be(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: bytes
) -> None:
    (run / "metrics.jsonl.gz").write_bytes(damage)
    assert main([str(run), "--out", str(tmp_path / "a")]) == 2
    error = capsys.readouterr().err
    assert str(run) in error
    assert "None" not in error
