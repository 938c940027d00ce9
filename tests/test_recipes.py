"""The pages that show how to add something are followed to the letter, in a copy of the project."""

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lm.data.archive import Archive, archive_source
from lm.data.corpus import Corpus
from lm.data.prepare import prepare
from lm.data.source import SPLITS, ArchiveConfig, Source
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


def test_archive_of_the_page_is_read(tmp_path: Path) -> None:
    """The indented example: a .zip with a member per split."""
    page = ROOT / "docs/adding-a-corpus.md"
    (example,) = re.findall(r"^    ARCHIVE = (?:.*\n)+?(?=\S)", page.read_text(), re.M)
    names: dict[str, Any] = {"PoemsConfig": ArchiveConfig, "SPLITS": SPLITS, "Source": Source}
    names |= {"Archive": Archive, "archive_source": archive_source}
    exec(textwrap.dedent(example), names)
    with zipfile.ZipFile(tmp_path / "poems.zip", "w") as archive:
        for split, text in (("train", "a rose\nis a rose\n"), ("valid", "a rose\n"), ("test", "is\n")):
            archive.writestr(f"poems/poems.{split}.txt", text)
        archive.writestr("poems/license.txt", "not a poem\n")
    config = ArchiveConfig("poems", root=f"{tmp_path}/data", archive=f"{tmp_path}/poems.zip", min_count=1)
    prepare(names["source"](config), tmp_path / "prepared")
    corpus = Corpus.open(tmp_path / "prepared")
    words = {split: " ".join(corpus.vocabulary.decode(corpus.split(split))) for split in SPLITS}
    assert words == {"train": "a rose </s> is a rose </s>", "valid": "a rose </s>", "test": "is </s>"}


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
