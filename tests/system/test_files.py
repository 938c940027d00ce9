"""Atomic file writes, and valid JSON."""

import json
import math
import os
import stat
import subprocess
import sys
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


def test_links_pipes_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "link").symlink_to("inner/file")
    for content in (b"first", b"second"):
        write_whole(tmp_path / "link", lambda file, content=content: file.write(content))  # type: ignore[misc]
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "inner/file").read_bytes() == content
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to-pipe").symlink_to("pipe")
    for name in ("pipe", "to-pipe"):
        reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        write_whole(tmp_path / name, lambda file: file.write(b"through"))
        assert os.read(reader, 100) == b"through"
        os.close(reader)
    assert stat.S_ISFIFO((tmp_path / "pipe").lstat().st_mode)
    assert (tmp_path / "to-pipe").is_symlink()
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("append", [">", ">>"])
def test_file_behind_stdout_keeps_what_was_printed(tmp_path: Path, append: str) -> None:
    code = "from pathlib import Path; from lm.system.files import write_whole; print(1)"
    code += "; write_whole(Path('/proc/self/fd/1'), lambda file: file.write(b'2\\n')); print(3)"
    subprocess.run(["bash", "-c", f'"$0" -c "$1" {append} out', sys.executable, code], cwd=tmp_path, check=True)
    assert (tmp_path / "out").read_text() == "1\n2\n3\n"
