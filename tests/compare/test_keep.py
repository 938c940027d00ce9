"""Kept runs: the same tables from a few small files, without machine-specific paths."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from lm.compare.run_records import read_run
from tests.conftest import compare_runs


@pytest.fixture(autouse=True)
def _without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of the time, and is tested in test_compare.py."""
    monkeypatch.setattr("lm.compare.can_plot", lambda: False)


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_run, tmp_path / "runs/one"))


def records(folder: Path) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads((folder / "comparison.json").read_text())
    return [{key: value for key, value in row.items() if key != "folders"} for row in rows]


def test_kept_runs_give_the_same_table(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept"
    assert compare_runs([str(run), "--out", str(tmp_path / "a"), "--keep", str(kept)]) == 0
    assert "The metrics of 1 run are in" in capsys.readouterr().out
    assert compare_runs([str(kept), "--out", str(tmp_path / "b")]) == 0
    (before,), (after,) = records(tmp_path / "a"), records(tmp_path / "b")
    for key, value in before.items():
        assert after[key] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), key
    files = sorted(file.name for file in (kept / "one").iterdir())
    assert files == ["config.yaml", "metrics.jsonl.gz", "run.json", "summary.json"]


def test_folders_and_host_name_are_removed(run: Path, tmp_path: Path) -> None:
    start = {
        "command": f"python {tmp_path}/train.py seed=2 run_dir=../a/x 'data.dir={tmp_path}/my text' init=./old "
        f"'mix=[{tmp_path}/a,{tmp_path}/b]'",
        "folder": str(tmp_path),
        "host": "somebodys-box",
        "ranks": 1,
    }
    (run / "run.json").write_text(json.dumps({"starts": [start]}))
    config = (run / "config.yaml").read_text().replace("init: null", f"init: {tmp_path}/runs/old")
    (run / "config.yaml").write_text(config)
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(
        json.dumps(summary | {"source": f"text of '{tmp_path}/corpus' from https://x.org/a/b"})
    )
    kept = tmp_path / "kept"
    assert compare_runs([str(run), "--out", str(tmp_path / "a"), "--keep", str(kept)]) == 0
    text = "".join((kept / "one" / name).read_text() for name in ("config.yaml", "run.json", "summary.json"))
    assert str(tmp_path) not in text
    assert "somebodys-box" not in text
    assert "python train.py seed=2 run_dir=x 'data.dir=my text' init=old 'mix=[a,b]'" in text
    assert "init: old" in text
    assert "text of 'corpus' from https://x.org/a/b" in text


def test_runs_that_cannot_be_kept_raise(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep = ["--out", str(tmp_path / "a"), "--keep", str(tmp_path / "kept")]
    before = {file: file.read_bytes() for file in run.iterdir() if file.is_file()}
    assert compare_runs([str(run), "--out", str(tmp_path / "a"), "--keep", str(run.parent)]) == 2
    assert "another folder than that of the runs" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in run.iterdir() if file.is_file()} == before
    another = shutil.copytree(run, tmp_path / "other" / run.name)
    config = (another / "config.yaml").read_bytes()
    assert compare_runs([str(run), "--out", str(tmp_path / "a"), "--keep", str(another.parent)]) == 2
    assert "must not overwrite a run" in capsys.readouterr().err
    assert (another / "config.yaml").read_bytes() == config
    (tmp_path / "file").touch()
    assert compare_runs([str(run), "--out", str(tmp_path / "a"), "--keep", str(tmp_path / "file")]) == 2
    assert "file/one cannot be written" in capsys.readouterr().err
    shutil.copytree(run, tmp_path / "runs/deep/one")
    assert compare_runs([str(run), str(tmp_path / "runs/deep/one"), *keep]) == 2
    assert "Two of the runs are named one" in capsys.readouterr().err
    (run / "summary.json").unlink()
    assert compare_runs([str(run), *keep]) == 2
    assert "is not finished" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [b"", b"no gzip", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff\x00"])
def test_damaged_kept_metrics_raise(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: bytes
) -> None:
    (run / "metrics.jsonl").rename(run / "metrics.jsonl.gz")
    (run / "metrics.jsonl.gz").write_bytes(damage)
    assert compare_runs([str(run), "--out", str(tmp_path / "a")]) == 2
    error = capsys.readouterr().err
    assert str(run) in error
    assert "None" not in error


def test_older_run_without_a_setting_is_comparable(run: Path) -> None:
    now = read_run(run)
    config = yaml.safe_load((run / "config.yaml").read_text())
    del config["model"]["maxent"], config["trainer"]["average"]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert read_run(run).settings == now.settings
