"""Serves the defaults of the settings dataclasses to Hydra, so that a YAML file holds only what differs.

`conf/output/adaptive.yaml` extends `adaptive_schema` in its defaults list. That config is made here from the settings
of the plug-in `adaptive`, which is imported on demand. The values are untyped: `lm.config.validate` checks them after
composition, so that all mistakes are reported together.
"""

from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from lm.config.groups import FOLDERS, find_plugin, plugin_names
from lm.config.inference import EvaluateConfig, ExportConfig, GenerateConfig
from lm.config.schema import NgramConfig, PrepareConfig, TrainConfig
from lm.config.validate import default_values

SUFFIX = "_schema"
COMMANDS: dict[str, type] = {
    f"train{SUFFIX}": TrainConfig,
    f"prepare{SUFFIX}": PrepareConfig,
    f"ngram{SUFFIX}": NgramConfig,
    "evaluate": EvaluateConfig,
    "generate": GenerateConfig,
    "export": ExportConfig,
}
"""Root configs by name. The last three have no groups and need no YAML file."""
HYDRA: dict[str, Any] = {
    "defaults": [
        {"override /hydra/hydra_logging": "none"},
        {"override /hydra/job_logging": "none"},
        "_self_",
    ],
    # The run directory is named, locked and resumed by `lm.training.run_dir`, unless hydra.run.dir is set.
    "hydra": {
        "output_subdir": None,
        "run": {"dir": "."},
        "sweep": {"dir": "runs", "subdir": "${slug:${hydra.job.override_dirname}}"},
        "job": {"config": {"override_dirname": {"kv_sep": "-", "item_sep": "-"}}},
        "callbacks": {"sweep": {"_target_": "lm.cli.SweepFolder"}},
    },
}
"""Hydra settings shared by all commands: no output folder, no log files, runs of a sweep named by what differs."""


class SchemaSource(ConfigSource):
    """Config source with the scheme `schema://`."""

    @staticmethod
    def scheme() -> str:
        return "schema"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return False  # the groups to choose from are folders of conf/

    def is_config(self, config_path: str) -> bool:
        return _settings(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []  # schemas are not options to choose from

    def load_config(self, config_path: str) -> ConfigResult:
        settings, name = _settings(config_path), config_path.removesuffix(".yaml")
        assert settings is not None
        values = default_values(settings)
        if name in COMMANDS:
            values = {**HYDRA, **values}
        else:  # options of a group may share their settings
            values["name"] = name.rpartition("/")[2].removesuffix(SUFFIX)
        config = OmegaConf.create(values)
        return ConfigResult(self.provider, self.full_path(), config, header={"package": None})


def _settings(config_path: str) -> type | None:
    """Return the dataclass behind a config path, imported with its plug-in, or None."""
    group, _, name = config_path.removesuffix(".yaml").rpartition("/")
    option = name.removesuffix(SUFFIX)
    if name.endswith(SUFFIX) and group in FOLDERS and option in plugin_names(group):
        return find_plugin(group, option).settings
    return None if group else COMMANDS.get(name)


class SchemaSearchPath(SearchPathPlugin):
    """Appends the schemas to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("lm", "schema://")


def register() -> None:
    """Register the schemas with Hydra; call before composing."""
    Plugins.instance().register(SchemaSource)
    Plugins.instance().register(SchemaSearchPath)
