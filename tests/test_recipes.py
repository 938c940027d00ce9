"""The pages that show how to add something are followed to the letter, in a copy of the project."""

import ast
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.helpers.pages import RECIPES, commands, write_files

SMALL = ["trainer.max_steps=8", "trainer.batch_size=4", "trainer.threads=1", "model.hidden_size=16"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project, with a text where the pages suppose one."""
    for name in ("lm", "conf", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train.py", "evaluate.py", "pyproject.toml"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    for folder, pattern in [("PATH", "{}.txt"), ("data/poems", "poems.{}.txt")]:
        (tmp_path / folder).mkdir(parents=True)
        for split in ("train", "valid", "test"):
            text = "the quick brown fox jumps over the lazy <unk>\n" * 40
            (tmp_path / folder / pattern.format(split)).write_text(text)
    return tmp_path


def run(project: Path, *words: str) -> None:
    done = subprocess.run([sys.executable, *words], cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_page_adds_three_files_and_changes_none(page: Path, project: Path) -> None:
    kinds = sorted(Path(name).suffix for name in write_files(page, project=project))
    assert kinds == [".py", ".py", ".yaml"]


@pytest.mark.slow
@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_page_works_when_followed(page: Path, project: Path) -> None:
    write_files(page, project=project)
    for line in commands(page):
        program, *words = shlex.split(line, comments=True)
        assert program == "python"
        run(project, *words, *(SMALL if words[0] == "train.py" else []))
    run(project, "-m", "ruff", "check", ".")
    run(project, "-m", "ruff", "format", "--check", ".")
    run(project, "-m", "mypy")


# ---- the notebook ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "train.py").symlink_to(ROOT / "train.py")
    cells = json.loads((ROOT / "docs/notebook.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    results = []
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        *before, last = ast.parse(cell["source"]).body
        exec(compile(ast.Module(before, []), "notebook", "exec"), names)
        if isinstance(last, ast.Expr):
            results.append(repr(eval(compile(ast.Expression(last.value), "notebook", "eval"), names)))
        else:
            exec(compile(ast.Module([last], []), "notebook", "exec"), names)
    assert any("TrainedModel(" in result for result in results)
    assert any("surprisal" in result for result in results)
