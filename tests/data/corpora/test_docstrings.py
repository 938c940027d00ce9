"""The larger built-in corpus: which packages it reads, and that its splits hold next to nothing of training."""

import platform
import re
import sysconfig
from importlib.metadata import requires, version
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lm.data.corpora import docstrings
from lm.data.corpora.docstrings import PACKAGES, DocstringsConfig, files_of, installed, source, standard_library
from lm.data.prepare import open_corpus
from lm.data.source import SPLITS
from tests.conftest import ROOT


def needed_by(name: str, extra: str, found: set[str]) -> set[str]:
    """The packages that are installed with one, in the spelling of the registry."""
    for text in requires(name) or []:
        needed = Requirement(text)
        if canonicalize_name(needed.name) not in found and (
            not needed.marker or needed.marker.evaluate({"extra": extra})
        ):
            found.add(canonicalize_name(needed.name))
            needed_by(needed.name, "", found)
    return found


def test_only_pinned_packages_that_training_installs_are_read() -> None:
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert set(PACKAGES) <= set(pinned)
    assert set(map(canonicalize_name, PACKAGES)) <= needed_by("adaptive-lm", "plots", set())


def test_versions_are_recorded_and_absent_packages_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docstrings, "PACKAGES", ["numpy", "no-such-package", "torch"])
    made = source(DocstringsConfig())
    torch = version("torch").split("+")[0]
    assert made.meta["packages"] == {"numpy": version("numpy"), "torch": torch}
    assert made.meta["absent_packages"] == ["no-such-package"]
    assert made.meta["source"] == (
        f"the docstrings of Python {platform.python_version()}, numpy {version('numpy')}, torch {torch} "
        "(not installed: no-such-package)"
    )
    monkeypatch.setattr(docstrings, "PACKAGES", ["numpy"])
    assert source(DocstringsConfig()).folder != made.folder


def test_tests_are_not_read() -> None:
    installed_in, python = Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("stdlib"))
    files = [file.relative_to(installed_in) for name in ("packaging", "mpmath") for file in files_of(name)]
    files += [file.relative_to(python) for file in standard_library()]
    assert {"ast.py", "markers.py", "calculus"} & {part for file in files for part in file.parts[-2:]} == {
        "ast.py",
        "markers.py",
        "calculus",
    }
    assert not [file for file in files if "tests" in file.parts]
    assert not [file for file in standard_library() if {"site-packages", "tkinter", "idlelib"} & set(file.parts)]


def test_the_folder_is_named_by_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    before = source(DocstringsConfig()).folder
    monkeypatch.setattr(docstrings, "NOT_EVERYWHERE", set())
    assert source(DocstringsConfig()).folder != before


def test_a_small_one_trains_on_what_its_packages_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docstrings, "PACKAGES", ["pyparsing"])
    monkeypatch.setattr(docstrings, "standard_library", lambda: [])
    corpus = open_corpus(DocstringsConfig(root=str(tmp_path)))
    text = " ".join(corpus.vocabulary.decode(corpus.split("train")))
    assert "the" in corpus.vocabulary.words[:20]
    assert "parser" in corpus.vocabulary.words
    assert text == text.lower()
    assert corpus.meta["packages"] == installed(["pyparsing"])[0]


@pytest.mark.slow
def test_the_whole_corpus(tmp_path: Path) -> None:
    corpus = open_corpus(DocstringsConfig(root=str(tmp_path)))
    sizes = np.array([len(corpus.split(split)) for split in SPLITS])
    assert sizes.sum() > 4_000_000
    assert np.abs(sizes / sizes.sum() - [0.9, 0.05, 0.05]).max() < 0.005
    assert 20_000 < len(corpus.vocabulary) < 40_000

    def grams(name: str) -> list[bytes]:
        return [window.tobytes() for window in np.lib.stride_tricks.sliding_window_view(corpus.split(name), 12)]

    training = set(grams("train"))
    for split in ("valid", "test"):
        held_out = grams(split)
        assert sum(gram in training for gram in held_out) <= 0.02 * len(held_out)
