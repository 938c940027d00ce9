"""`python -m lm.prepare` prepares once, prints a summary, and leaves nothing after an error."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lm.config.groups import plugin_names
from tests.conftest import ROOT, Command
from tests.helpers.archives import EUROPARL, write_folder, write_tar, write_zip

PREPARE = "lm/prepare.py"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run_module(folder: Path, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    """Run the command in a new process."""
    return subprocess.Popen(
        [sys.executable, "-m", "lm.prepare", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}", "no_proxy": "*", **environment},
    )


def test_prepares_once_and_prints_the_record(command: Command, workspace: Path) -> None:
    archive = write_tar(workspace / "mine.tgz", EUROPARL)
    arguments = [PREPARE, "data=europarl", f"data.archive={archive}", "data.min_count=1"]
    first = command(*arguments).stdout
    prepared = contents(workspace / "data")
    second = command(*arguments).stdout
    assert contents(workspace / "data") == prepared
    meta = json.loads(next(data for name, data in prepared.items() if name.endswith("meta.json")))
    folder = next((workspace / "data").iterdir()).name
    assert f"'data/{folder}' is prepared\n" in first
    assert second.startswith(f"'data/{folder}' is prepared already\n")
    for output in (first, second):
        for expected in (meta["archive"]["sha256"], str(archive), meta["rule"]["splits"], meta["rule"]["tokens"]):
            assert expected in output
        assert "<unk> (0 times in training) and </s> (492)" in output
        assert f"train   {meta['splits']['train']['tokens']:,}" in output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["data=europa", "output=full", "output.cutoffs=auto"], "Did you mean data=europarl?"),
        (["data=text8", "data.url=http://127.0.0.1:1/a=b,c?(d)", "data.root=d"], "http://127.0.0.1:1/a=b,c?(d)"),
        (["data=text8", "data.archive=nowhere"], "data.archive must name text8.zip"),
        (["data=text8", "data.archive=broken.zip"], "'broken.zip' must be"),
        (["data=text8", "data.archive=empty/text8"], "train split"),
        (["data=pydoc", "data.root=empty/text8"], "'empty/text8/pydoc-"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(
    command: Command, workspace: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: str
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    broken = write_zip(workspace / "broken.zip", {"text8": "abc " * 1000})
    broken.write_bytes(broken.read_bytes()[:-30])
    write_folder(workspace, {"empty/text8": ""})
    before = contents(workspace)
    done = command(PREPARE, *arguments, check=2)
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) == (3 if "output=full" in arguments else 1)
    assert contents(workspace) == before


def test_neither_help_nor_preparing_imports_torch(tmp_path: Path) -> None:
    """A module named torch that raises is first on the path."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    path = f"{tmp_path}:{ROOT}"
    shown = run_module(tmp_path, "--help", PYTHONPATH=path)
    done = run_module(tmp_path, "data=zipf", "data.tokens=1000", "data.vocab_size=16", PYTHONPATH=path)
    assert all(name in shown.communicate()[0] for name in plugin_names("data"))
    assert "is prepared" in done.communicate()[0]
    assert (shown.returncode, done.returncode) == (0, 0)
