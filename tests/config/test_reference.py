"""docs/settings.md and `--help` come from the dataclasses."""

from lm.config.inference import EvaluateConfig, GenerateConfig
from lm.config.reference import document
from lm.config.registry import FOLDERS, find_plugin, plugin_names
from lm.config.schema import NgramConfig, TrainConfig
from tests.conftest import ROOT
from tests.helpers.settings_page import markdown


def test_settings_page_is_current() -> None:
    written = (ROOT / "docs/settings.md").read_text()
    assert written == f"{markdown()}\n", "run python -m tests.helpers.settings_page > docs/settings.md"


def test_every_setting_has_an_explanation() -> None:
    plugins = [find_plugin(group, name).settings for group in FOLDERS for name in plugin_names(group)]
    schemas = [TrainConfig, EvaluateConfig, GenerateConfig, NgramConfig, *plugins]
    assert [(schema.__name__, key) for schema in schemas for key, _, text in document(schema) if not text] == []
