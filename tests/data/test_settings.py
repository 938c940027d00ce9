"""Corpus plug-ins: found by file name, and importing them is cheap."""

import subprocess
import sys

import pytest

from lm.config.registry import find_plugin, plugin_names
from tests.conftest import ROOT

NAMES = plugin_names("data")


def test_corpora_are_the_files_of_their_folder() -> None:
    assert {"europarl", "one_billion_word", "pydoc", "text", "text8", "wikitext2", "zipf"} <= set(NAMES)
    with pytest.raises(KeyError):
        find_plugin("data", "nonsense")


def test_no_corpus_imports_torch_or_numba() -> None:
    finds = "; ".join(f"find_plugin('data', {name!r})" for name in NAMES)
    check = f"import sys\nfrom lm.config.registry import find_plugin\n{finds}\n"
    check += "assert not {'torch', 'numba', 'sentencepiece'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
