"""Checkpoints: whole or not at all, refused when unfit, harmless to open."""

import os
import pickle
from pathlib import Path

import pytest
import torch

from lm import checkpoint
from lm.errors import UserError


def content(value: int = 1) -> dict[str, object]:
    return {"config": {"seed": value}, "model": {"weight": torch.full((50, 40), float(value))}}


def test_round_trip_and_second_name(tmp_path: Path) -> None:
    checkpoint.save(content(1), tmp_path / "last.pt", also=tmp_path / "best.pt")
    checkpoint.save(content(2), tmp_path / "last.pt")
    assert checkpoint.load(tmp_path / "last.pt")["config"] == {"seed": 2}
    assert checkpoint.load(tmp_path / "best.pt")["config"] == {"seed": 1}
    assert torch.equal(checkpoint.load(tmp_path / "best.pt")["model"]["weight"], torch.ones(50, 40))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.pt", "last.pt"]


def test_a_second_name_where_the_disk_has_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Path) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    checkpoint.save(content(1), tmp_path / "last.pt", also=tmp_path / "best.pt")
    assert checkpoint.load(tmp_path / "best.pt")["config"] == {"seed": 1}


def test_a_failing_write_leaves_the_old_file(tmp_path: Path) -> None:
    checkpoint.save(content(1), tmp_path / "last.pt")
    with pytest.raises(TypeError, match="pickle"):
        checkpoint.save({**content(2), "bad": open(os.devnull)}, tmp_path / "last.pt")  # noqa: SIM115, PTH123
    assert checkpoint.load(tmp_path / "last.pt")["config"] == {"seed": 1}


def test_every_truncation_is_refused_in_one_line(tmp_path: Path) -> None:
    checkpoint.save(content(), tmp_path / "last.pt")
    whole = (tmp_path / "last.pt").read_bytes()
    for length in [0, 1, 10, 100, len(whole) // 2, len(whole) - 100, len(whole) - 1]:
        (tmp_path / "cut.pt").write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"cut\.pt cannot be read as a checkpoint") as error:
            checkpoint.load(tmp_path / "cut.pt")
        assert "\n" not in str(error.value)


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch pwned",)


def test_foreign_files_are_refused_and_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"format": 1, "config": {}, "bomb": Bomb()}, tmp_path / "bomb.pt")
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps(Bomb()))
    (tmp_path / "text.pt").write_text("hello")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"weights": torch.zeros(2)}, tmp_path / "other.pt")
    torch.save({"format": 99, "config": {}}, tmp_path / "newer.pt")
    for name, message in [
        ("bomb.pt", "cannot be read"),
        ("pickle.pt", "cannot be read"),
        ("text.pt", "cannot be read"),
        ("list.pt", "not a checkpoint of this program"),
        ("other.pt", "not a checkpoint of this program"),
        ("newer.pt", "has checkpoint format 99; this version reads format 1"),
    ]:
        with pytest.raises(UserError, match=message):
            checkpoint.load(tmp_path / name)
    assert not (tmp_path / "pwned").exists()


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no checkpoints/last\.pt"):
        checkpoint.find(str(tmp_path))
    with pytest.raises(UserError, match=r"nowhere does not exist"):
        checkpoint.find(str(tmp_path / "nowhere"))


def test_shapes_are_compared_before_anything_is_allocated(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(1 << 20, 1 << 20)  # 4 TiB: it would not fit
    weights = {"weight": torch.zeros(2, 3), "extra": torch.zeros(1)}
    with pytest.raises(UserError) as error:
        checkpoint.check_shapes(weights, model, path=tmp_path)
    assert "weight: (2, 3) in the file, (1048576, 1048576) by its settings" in str(error.value)
    assert "extra: (1,) in the file, unknown by its settings" in str(error.value)
    assert "bias: missing in the file" in str(error.value)
