"""Atomic file writes, and valid JSON."""

import json
import math
from pathlib import Path
from typing import BinaryIO

import pytest

from lm.system.files import json_ready, write_json, write_whole


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, lambda file: file.write(b"old"))

    def fail(file: BinaryIO) -> None:
        file.write(b"half of the new")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        write_whole(path, fail)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_nan_and_infinity_become_null(tmp_path: Path) -> None:
    value = {"a": math.nan, "b": [1.5, math.inf, {"c": -math.inf}], "d": None, "e": "nan"}
    assert json_ready(value) == {"a": None, "b": [1.5, None, {"c": None}], "d": None, "e": "nan"}
    write_json(tmp_path / "x.json", value)
    assert json.loads((tmp_path / "x.json").read_text(), parse_constant=lambda _: 1 / 0) == json_ready(value)
