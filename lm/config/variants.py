"""The variants of each group, by name."""

from lm.config.data import EuroparlConfig, OneBillionWordConfig, PydocConfig, Text8Config, TextConfig, ZipfConfig
from lm.config.model import (
    AdaptiveConfig,
    DSoftmaxConfig,
    DSoftmaxStarConfig,
    FullConfig,
    HierarchicalConfig,
    SampledConfig,
)

VARIANTS: dict[str, dict[str, type]] = {
    "data": {
        "pydoc": PydocConfig,
        "zipf": ZipfConfig,
        "text": TextConfig,
        "text8": Text8Config,
        "europarl": EuroparlConfig,
        "one_billion_word": OneBillionWordConfig,
    },
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
