"""Corpus plug-ins: found by file name, settings that match their yaml, and no torch to check them."""

import subprocess
import sys
from dataclasses import fields

import pytest
from omegaconf import OmegaConf

from lm.config.registry import find_plugin, plugin_names
from lm.config.validate import plain_values
from lm.data.settings import CorpusConfig
from tests.conftest import ROOT

NAMES = plugin_names("data")


def test_the_corpora_are_the_files_of_their_folder() -> None:
    assert {"europarl", "one_billion_word", "pydoc", "text", "text8", "zipf"} <= set(NAMES)
    with pytest.raises(KeyError):
        find_plugin("data", "nonsense")


@pytest.mark.parametrize("name", NAMES)
def test_settings_and_yaml_have_the_same_keys(name: str) -> None:
    found = find_plugin("data", name)
    assert issubclass(found.settings, CorpusConfig)
    values = OmegaConf.load(ROOT / f"conf/data/{name}.yaml")
    assert {str(key) for key in values} <= {field.name for field in fields(found.settings)}
    assert values.name == name


@pytest.mark.parametrize("name", NAMES)
def test_yaml_values_equal_the_defaults_of_the_dataclass(name: str) -> None:
    values = OmegaConf.load(ROOT / f"conf/data/{name}.yaml")
    defaults = plain_values(find_plugin("data", name).settings())
    assert {key: defaults[key] for key in values} == values


def test_no_corpus_imports_torch() -> None:
    imports = "; ".join(f"import lm.data.corpora.{name}" for name in NAMES)
    check = f"import sys; {imports}; assert not {{'torch', 'numba', 'sentencepiece'}} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
