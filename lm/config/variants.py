"""The variants of each group, by name; those of a plug-in group are found by the registry."""

from typing import get_type_hints

from lm.config.groups import DataConfig
from lm.config.model import (
    AdaptiveConfig,
    DSoftmaxConfig,
    DSoftmaxStarConfig,
    FullConfig,
    HierarchicalConfig,
    SampledConfig,
)
from lm.config.registry import find_plugin, plugin_names

VARIANTS: dict[str, dict[str, type]] = {
    "output": {
        "full": FullConfig,
        "sampled": SampledConfig,
        "hsm_freq": HierarchicalConfig,
        "hsm_sim": HierarchicalConfig,
        "dsoftmax": DSoftmaxConfig,
        "dsoftmax_star": DSoftmaxStarConfig,
        "adaptive": AdaptiveConfig,
    },
}
ROOTS: dict[str, type] = {"data": DataConfig}
"""Groups whose options are plug-ins, and the settings class that declares such a group."""


def option_names(key: str, declared: type) -> list[str]:
    """The names that a group's settings may have; none if the key is declared as one fixed class."""
    if ROOTS.get(key) is declared:
        return plugin_names(key)
    return [name for name, variant in VARIANTS.get(key, {}).items() if issubclass(variant, declared)]


def settings_class(key: str, name: str) -> type:
    """The settings of one of these options."""
    return find_plugin(key, name).settings if key in ROOTS else VARIANTS[key][name]


def owners(key: str, field: str) -> list[str]:
    """The options of a group that have such a setting."""
    names = plugin_names(key) if key in ROOTS else VARIANTS.get(key, {})
    return [name for name in names if field in get_type_hints(settings_class(key, name))]
