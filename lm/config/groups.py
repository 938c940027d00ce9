"""What a plug-in needs: rules for its settings, its registration, and the base settings of its group."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_type_hints

# ---- rules for a field's annotation ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """Bounds of a number; infinity leaves a side open."""

    least: float = -math.inf
    above: float = -math.inf
    below: float = math.inf
    most: float = math.inf

    def __str__(self) -> str:
        bounds = {"at least": self.least, "above": self.above, "below": self.below, "at most": self.most}
        return " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if math.isfinite(bound))

    def holds(self, value: float) -> bool:
        return self.least <= value <= self.most and self.above < value < self.below


@dataclass(frozen=True)
class Increasing:
    """Requires increasing positive numbers, at least `fewest` of them."""

    fewest: int = 0

    def __str__(self) -> str:
        return "of increasing positive numbers"

    def holds(self, values: list[int]) -> bool:
        return len(values) >= self.fewest and all(a < b for a, b in pairwise([0, *values]))


class MayBeEmpty:
    """Marks a text that may be empty."""


class Resumable:
    """Marks a setting that may differ when a run is resumed: limits, logging, device."""


Count = Annotated[int, Range(least=1)]
Width = Annotated[int, Range(least=1, most=1e9)]
"""Width of a vector or matrix; the bound keeps sizes within 64 bits."""
OptionalCount = Annotated[int | None, Range(least=1)]
OptionalSeconds = Annotated[float | None, Range(above=0)]
Rate = Annotated[float, Range(least=0, below=1)]
OptionalRate = Annotated[float | None, Range(least=0, below=1)]
Penalty = Annotated[float, Range(least=0)]


FOLDERS = {
    "data": "data/corpora",
    "output": "output/layers",
    "model": "model/cores",
    "input": "model/inputs",
    "optim": "optim/optimizers",
}
"""Folder of each group's plug-ins, below `lm/`."""
Target = TypeVar("Target", bound=Callable[..., Any])


class Plugin(NamedTuple):
    """An option of a group."""

    settings: type
    target: Any
    """The registered class or function, which implements its group's contract."""


_registered: dict[tuple[str, str], Plugin] = {}


def plugin(group: str, name: str, settings: type) -> Callable[[Target], Target]:
    """Register a class or function as `group=name`."""

    def register(target: Target) -> Target:
        _registered[group, name] = Plugin(settings, target)
        return target

    return register


@cache
def _modules(group: str) -> dict[str, str]:
    """Map each option of a group to its module, without importing any."""
    folder = Path(__file__).resolve().parents[1] / FOLDERS[group]
    package = f"lm.{FOLDERS[group].replace('/', '.')}"
    decorator = re.compile(rf'^@plugin\(\s*"{group}",\s*"([^"]+)"', re.MULTILINE)
    return {
        name: f"{package}.{path.stem}"
        for path in sorted(folder.glob("*.py"))
        for name in decorator.findall(path.read_text(encoding="utf-8"))
    }


def plugin_names(group: str) -> list[str]:
    """List all options of a group without importing any."""
    return sorted(_modules(group))


def find_plugin(group: str, name: str) -> Plugin:
    """Return the plug-in that registers `group=name`; KeyError if there is none."""
    if (group, name) not in _registered:
        import_module(_modules(group)[name])
    return _registered[group, name]


def settings_of(target: Any) -> tuple[str, Any]:
    """Return the name and the settings class that a plug-in was registered with."""
    return next((name, plugin.settings) for (_, name), plugin in _registered.items() if plugin.target is target)


def plugins_with(group: str, setting: str) -> list[str]:
    """Return the plug-ins of a group that have this setting."""
    return [name for name in plugin_names(group) if setting in get_type_hints(find_plugin(group, name).settings)]


# ---- base settings of each group -------------------------------------------------------------------------------------


SPLITS = ("train", "valid", "test")
DEFAULT_ROOT = "data"
"""Default of `data.root`."""
LIMITS = ("max_epochs", "max_steps", "max_tokens", "max_seconds")
"""Keys of `trainer` that limit a run."""
DEPENDS_ON = {"halve_after_half": ("max_epochs",), "linear": LIMITS, "cosine": LIMITS}
"""Limits of a run that its learning rate depends on, by `optim.schedule`."""
EncodingErrors = Literal["strict", "replace"]
Schedule = Literal["constant", "halve_after_half", "linear", "cosine", "plateau"]


@dataclass
class DataConfig:
    """A corpus: its source and its tokenization."""

    name: str
    """The corpus, as in `data=pydoc`."""
    root: str = DEFAULT_ROOT
    """Folder for downloaded and prepared corpora."""
    sequences: Literal["stream", "lines"] = field(default="stream", kw_only=True)
    """`stream`: one continuous text; `lines`: shuffled lines, each from a zero state, also in evaluations."""


@dataclass
class MaxEntConfig:
    """MaxEnt features: hashed n-gram weights, added to the logits and trained with the network."""

    order: Annotated[int | None, Range(least=0, most=9)] = None
    """Order of the longest n-grams; null or 0 for none."""
    size: Annotated[int, Range(least=1, most=1e11)] = 1 << 22
    """Number of weights, shared by all n-grams through hashing."""


@dataclass
class ModelConfig:
    """A core (`model=lstm`), which turns embedded words into hidden states."""

    name: str
    """The core, as in `model=lstm`."""
    embedding_size: Width = 256
    """Width of the word embeddings."""
    hidden_size: Width = 512
    """Width of the core."""
    dropout: Rate = 0.0
    """Dropout rate on embeddings, between layers and on the core's output."""
    input_dropout: OptionalRate = None
    """Dropout rate on embeddings; null for model.dropout."""
    output_dropout: OptionalRate = None
    """Dropout rate on the core's output; null for model.dropout."""
    locked_dropout: bool = False
    """Use the same dropout masks for all steps of a batch (variational dropout)."""
    word_dropout: Rate = 0.0
    """Probability of zeroing all occurrences of a word in a batch."""
    activation_penalty: Penalty = 0.0
    """AR: weight of the mean square of the hidden states in the training loss (AWD-LSTM: 2)."""
    change_penalty: Penalty = 0.0
    """TAR: weight of the mean square of the hidden states' change from step to step (AWD-LSTM: 1)."""
    tie: bool = False
    """Tie input and output embeddings: input=table with output=full, input=adaptive with output=adaptive."""
    maxent: MaxEntConfig = field(default_factory=MaxEntConfig)

    @property
    def width(self) -> int:
        """Width of the hidden states that the output layer receives."""
        return self.hidden_size

    def rate(self, dropout: float | None) -> float:
        """Resolve an optional dropout rate."""
        return self.dropout if dropout is None else dropout


@dataclass
class InputConfig:
    """An input (`input=table`), which turns words into vectors."""

    name: str
    """The input, as in `input=table`."""

    tied_with = ""
    """The output layer whose embeddings this input can share (`model.tie`), if any."""

    def check_compatible(self, output: "OutputConfig", *, tied: bool) -> Iterator[str]:
        """Explain why this input and output layer cannot be combined."""
        if tied and output.name != self.tied_with:
            yield (
                "model.tie=true needs input=table with output=full, or input=adaptive with output=adaptive; got "
                f"input={self.name} with output={output.name}. Try model.tie=false."
            )


@dataclass
class OutputConfig:
    """An output layer (`output=adaptive`), which turns hidden states into a distribution over words."""

    name: str
    """The layer, as in `output=adaptive`."""

    supports_maxent = False
    """Whether `model.maxent` can be added to the layer's logits."""


@dataclass
class OptimConfig:
    """An optimizer (`optim=adagrad`)."""

    name: str
    """The optimizer, as in `optim=adagrad`."""
    lr: Annotated[float, Range(above=0)] = 0.1
    """Learning rate."""
    schedule: Schedule = "constant"
    """constant; linear or cosine decay to zero at the run's limit; plateau (by validation); halve_after_half."""
    warmup_steps: Annotated[int, Range(least=0)] = 0
    """Steps of linear warm-up, with any schedule."""
    plateau_factor: Annotated[float, Range(above=0, below=1)] = 0.5
    """Factor by which `plateau` multiplies the learning rate."""
    plateau_patience: Count = 1
    """Evaluations in a row without a better perplexity before `plateau` lowers the learning rate."""
    reduction: Literal["stream", "token"] = "stream"
    """Loss of a step: `stream` sums over steps and averages over streams; `token` averages over both."""
    max_grad_norm: Annotated[float | None, Range(above=0)] = 1.0
    """Clip the global gradient norm to this value; null disables clipping."""
    embedding: Literal["sparse", "rowwise", "dense"] = "sparse"
    """`sparse` and `rowwise` update the batch's rows, `rowwise` with one second moment per word; `dense` updates all.

    With Adagrad, `rowwise` is neither clipped nor decayed, as in the released code.
    """
