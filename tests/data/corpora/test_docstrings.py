"""The larger built-in corpus: docstrings equal those of imported modules, and splits do not overlap."""

import importlib.util
import inspect
import platform
import re
import sysconfig
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lm.data.corpora import docstrings
from lm.data.corpora.docstrings import (
    PACKAGES,
    DocstringsConfig,
    docstrings_of,
    files_of,
    installed,
    read_docstrings,
    source,
    standard_library,
)
from lm.data.corpus import open_corpus
from lm.data.source import SPLITS
from tests.conftest import ROOT
from tests.helpers.overlap import shared_12_grams

SOURCE = '''
"""The module's own,
    on two lines."""
import math

TEXT = """no docstring"""

class Outer:
    "One line."

    def method(self):
        r"""A raw \\string."""
        "not this one"

    class Inner:
        async def method(self):
            """Of a coroutine."""

        def silent(self):
            return 1

if math:
    def conditional():
        """Inside an if."""
else:
    try:
        pass
    except ValueError:
        pass

def last(argument="no"):
    \'\'\'   Indented,

        and in two paragraphs.
    \'\'\'
'''


def test_docstrings_equal_those_of_the_imported_module(tmp_path: Path) -> None:
    path = tmp_path / "documented.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("documented", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def of(thing: Any) -> list[str | None]:
        inner = [v for v in vars(thing).values() if inspect.isclass(v) or inspect.isfunction(v)]
        return [thing.__doc__, *(text for v in inner for text in of(v))]

    assert docstrings_of([path]) == [inspect.cleandoc(text) for text in of(module) if text]
    assert len(docstrings_of([path])) == 6


def test_files_are_not_run_and_invalid_ones_are_skipped(tmp_path: Path) -> None:
    contents = [
        '"""Kept."""\nraise SystemExit',
        "print 'Python 2'",
        b'"""\xff"""',
        "x = '\0'",
        r'"""One \ud800 half."""',
    ]
    files = [tmp_path / f"{number}.py" for number in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert list(read_docstrings([*files[:2], tmp_path / "gone.py", *files[2:]])) == ["Kept.", "One ? half."]


def requirements(name: str, extra: str, names: set[str]) -> set[str]:
    """Return a package's dependencies under their canonical names."""
    for requirement in map(Requirement, requires(name) or []):
        is_needed = not requirement.marker or requirement.marker.evaluate({"extra": extra})
        if is_needed and canonicalize_name(requirement.name) not in names:
            names.add(canonicalize_name(requirement.name))
            requirements(requirement.name, "", names)
    return names


def test_packages_are_pinned_and_installed_with_training() -> None:
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert set(PACKAGES) <= set(pinned)
    assert set(map(canonicalize_name, PACKAGES)) <= requirements("adaptive-lm", "plots", set())


def test_folder_and_record_name_packages_and_exclusions(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {source(DocstringsConfig()).folder}
    monkeypatch.setattr(docstrings, "PACKAGES", ["numpy", "no-such-package", "torch"])
    made, torch = source(DocstringsConfig()), version("torch").split("+")[0]
    assert made.meta["packages"] == {"numpy": version("numpy"), "torch": torch}
    assert made.meta["absent_packages"] == ["no-such-package"]
    assert f"{platform.python_version()}, numpy {version('numpy')}, torch {torch} (not" in made.meta["source"]
    monkeypatch.setattr(docstrings, "NOT_EVERYWHERE", set())
    assert len(folders | {made.folder, source(DocstringsConfig()).folder}) == 3


def test_files_of_tests_are_not_read() -> None:
    files = [file for name in ("packaging", "mpmath") for file in files_of(name)] + standard_library()
    assert {"ast.py", "markers.py", "calculus"} <= {part for file in files for part in file.parts[-2:]}
    roots = Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("stdlib"))
    relative = [file.relative_to(next(root for root in roots if file.is_relative_to(root))) for file in files]
    assert not [file for file in relative if {"tests", "site-packages", "tkinter", "idlelib"} & set(file.parts)]


def test_one_package_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docstrings, "PACKAGES", ["pyparsing"])
    monkeypatch.setattr(docstrings, "standard_library", lambda: [])
    corpus = open_corpus(DocstringsConfig(root=str(tmp_path)))
    text = " ".join(corpus.vocabulary.decode(corpus.split("train")))
    assert "the" in corpus.vocabulary.words[:20]
    assert "parser" in corpus.vocabulary.words
    assert text == text.lower()
    assert corpus.meta["packages"] == installed(["pyparsing"])[0]


@pytest.mark.slow
def test_sizes_and_overlap_of_the_whole_corpus(tmp_path: Path) -> None:
    corpus = open_corpus(DocstringsConfig(root=str(tmp_path)))
    sizes = np.array([len(corpus.split(split)) for split in SPLITS])
    assert sizes.sum() > 4_000_000
    assert np.abs(sizes / sizes.sum() - [0.9, 0.05, 0.05]).max() < 0.005
    assert 20_000 < len(corpus.vocabulary) < 40_000
    assert max(shared_12_grams(corpus, split) for split in ("valid", "test")) <= 0.02
