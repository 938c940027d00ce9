"""The schema: the one place where a setting is declared, typed, explained and given its rules.

YAML files under `conf/` hold the values; these dataclasses say which keys exist and what they may be. A group that has
variants (`data=...`, `output=...`) has one dataclass per variant, found by the variant's `name`. Rules about one field
stand in its annotation; rules about several stand in the class's `problems`.

Nothing here imports torch, so that `--help` and a mistyped key answer at once.
"""

from lm.config.commands import (
    SPLIT_NAMES,
    Config,
    EvaluateCommandConfig,
    EvaluateCommandScoring,
    GenerateCommandConfig,
    LineFormat,
    LineState,
    Mode,
    OtherTextConfig,
    PrepareConfig,
)
from lm.config.data import (
    EUROPARL_LANGUAGES,
    ArchiveConfig,
    DataConfig,
    EncodingErrors,
    EuroparlConfig,
    EuroparlRelease,
    OneBillionWordConfig,
    PydocConfig,
    ShardOrder,
    Text8Config,
    TextConfig,
    TokenizedConfig,
    Tokenizer,
    ZipfConfig,
)
from lm.config.model import (
    AdaptiveConfig,
    ClusteredConfig,
    DSoftmaxConfig,
    DSoftmaxStarConfig,
    EmbeddingForm,
    FullConfig,
    HierarchicalConfig,
    ModelConfig,
    Objective,
    OptimConfig,
    OutputConfig,
    Reduction,
    SampledConfig,
    Schedule,
)
from lm.config.rules import Count, MayChange, OptionalCount, OptionalSeconds, Range
from lm.config.running import EvaluateConfig, TrainerConfig

__all__ = [
    "EUROPARL_LANGUAGES",
    "SPLIT_NAMES",
    "VARIANTS",
    "AdaptiveConfig",
    "ArchiveConfig",
    "ClusteredConfig",
    "Config",
    "Count",
    "DSoftmaxConfig",
    "DSoftmaxStarConfig",
    "DataConfig",
    "EmbeddingForm",
    "EncodingErrors",
    "EuroparlConfig",
    "EuroparlRelease",
    "EvaluateCommandConfig",
    "EvaluateCommandScoring",
    "EvaluateConfig",
    "FullConfig",
    "GenerateCommandConfig",
    "HierarchicalConfig",
    "LineFormat",
    "LineState",
    "MayChange",
    "Mode",
    "ModelConfig",
    "Objective",
    "OneBillionWordConfig",
    "OptimConfig",
    "OptionalCount",
    "OptionalSeconds",
    "OtherTextConfig",
    "OutputConfig",
    "PrepareConfig",
    "PydocConfig",
    "Range",
    "Reduction",
    "SampledConfig",
    "Schedule",
    "ShardOrder",
    "Text8Config",
    "TextConfig",
    "TokenizedConfig",
    "Tokenizer",
    "TrainerConfig",
    "ZipfConfig",
]

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
