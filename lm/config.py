"""The schema: the one place where a setting is declared, typed, explained and given its rules.

YAML files under `conf/` hold the values; these dataclasses say which keys exist and what they may be. A group that has
variants (`data=...`, `output=...`) has one dataclass per variant, found by the variant's `name`. Rules about one field
stand in its annotation; rules about several stand in the class's `problems`.

Nothing here imports torch, so that `--help` and a mistyped key answer at once.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Annotated, Any

# ---- rules that an annotation can carry --------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """Bounds of a number; None leaves a side open."""

    least: float | None = None
    above: float | None = None
    below: float | None = None

    def __str__(self) -> str:
        parts = [f"at least {self.least:g}"] if self.least is not None else []
        parts += [f"above {self.above:g}"] if self.above is not None else []
        parts += [f"below {self.below:g}"] if self.below is not None else []
        return " and ".join(parts)

    def holds(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )


class MayChange:
    """Marks a setting that may differ when a run is resumed: limits, logging, device."""


Count = Annotated[int, Range(least=1)]
OptionalCount = Annotated[int | None, Range(least=1)]
OptionalSeconds = Annotated[float | None, Range(above=0)]


class EmbeddingForm(Enum):
    """How the optimizer treats the word embedding table; see `lm.optim`."""

    sparse = "sparse"
    rowwise = "rowwise"
    dense = "dense"


class Schedule(Enum):
    """How the learning rate changes between epochs."""

    constant = "constant"
    halve_after_half = "halve_after_half"


# ---- data --------------------------------------------------------------------------------------------------------


@dataclass
class DataConfig:
    """A corpus: where it comes from and how its text becomes words."""

    name: str
    """The variant, as in `data=pydoc`."""
    root: str
    """Folder under which prepared corpora are kept, one folder each."""


@dataclass
class PydocConfig(DataConfig):
    """The Python language reference that ships inside every CPython: real prose, no network."""

    min_count: Count
    """Words seen less often in training become <unk>."""


@dataclass
class ZipfConfig(DataConfig):
    """A seeded Markov source over a Zipfian vocabulary whose true perplexity is known."""

    vocab_size: Annotated[int, Range(least=16)]
    """Words of the source, besides the two marks."""
    tokens: Annotated[int, Range(least=1000)]
    """Training tokens; validation and test get a tenth each."""
    seed: Annotated[int, Range(least=0)]
    """Seed of the source and of its text; not the seed of training."""


@dataclass
class TextConfig(DataConfig):
    """Your own `train.txt`, `valid.txt` and `test.txt`: one sentence a line, words between spaces."""

    dir: str | None
    """Folder that holds the three files."""
    lowercase: bool
    """Fold the text to lower case."""
    min_count: Count
    """Words seen less often in training become <unk>; with 1 none would, and <unk> itself is not learnt."""

    def problems(self) -> Iterator[str]:
        if not self.dir:
            yield (
                "data.dir must name the folder with train.txt, valid.txt and test.txt; got nothing. "
                "Try data=text data.dir=PATH"
            )


@dataclass
class ArchiveConfig(DataConfig):
    """A published corpus, read from its archive or from the folder it was unpacked to."""

    archive: str | None
    """The archive or unpacked folder; by default it is looked for in the corpus's own folder."""
    min_count: Count
    """Words seen less often in training become <unk>."""


@dataclass
class Text8Config(ArchiveConfig):
    """Text8: the first 100 M characters of a cleaned English Wikipedia."""


EUROPARL_LANGUAGES = "bg cs da de el en es et fi fr hu it lt lv nl pl pt ro sk sl sv"


@dataclass
class EuroparlConfig(ArchiveConfig):
    """Europarl v7: proceedings of the European Parliament in 21 languages."""

    language: str
    """Two-letter code."""

    def problems(self) -> Iterator[str]:
        if self.language not in EUROPARL_LANGUAGES.split():
            yield (f"data.language must be one of {EUROPARL_LANGUAGES}; got {self.language!r}. Try data.language=bg")


@dataclass
class OneBillionWordConfig(ArchiveConfig):
    """One Billion Word: shuffled English news sentences, already tokenised."""


# ---- model, output layer, optimizer ------------------------------------------------------------------------------


@dataclass
class ModelConfig:
    """embedding -> dropout -> LSTM -> dropout; the output layer is a group of its own."""

    embedding_size: Count
    hidden_size: Count
    """LSTM cell width."""
    layers: Count
    projection: OptionalCount
    """Width of the LSTM's output where it is projected (LSTM-2048-512: 512); null for none."""
    dropout: Annotated[float, Range(least=0, below=1)]
    """On the embedding, between layers and on the LSTM's output."""

    def problems(self) -> Iterator[str]:
        if self.projection is not None and self.projection >= self.hidden_size:
            yield (
                f"model.projection must be below model.hidden_size ({self.hidden_size}); got {self.projection}. "
                "Try model.projection=null"
            )


@dataclass
class OutputConfig:
    """An output layer; see `lm.output`."""

    name: str
    """The variant, as in `output=full`."""
    fused: bool
    """Loss and gradient in one pass that never keeps the logits; false is plain autograd, the reference."""


@dataclass
class FullConfig(OutputConfig):
    """Exact softmax over the whole vocabulary."""


@dataclass
class SampledConfig(OutputConfig):
    """Softmax trained against a sample of the vocabulary, exact in evaluation."""

    samples: Annotated[float, Range(above=0)]
    """Draws per step, as a share of the vocabulary; the paper's is 0.2."""


@dataclass
class HierarchicalConfig(OutputConfig):
    """Two-level softmax over classes and the words of a class; `hsm_freq` and `hsm_sim` differ in the classes."""

    classes: OptionalCount
    """Number of classes; null for the square root of the vocabulary."""


class Objective(Enum):
    """What automatic clusters minimise; see `lm.output.clusters`."""

    as_built = "as_built"
    paper = "paper"


@dataclass
class ClusteredConfig(OutputConfig):
    """Layers that cut the vocabulary, sorted by count, into a head and tails."""

    cutoffs: Any
    """Word ids at which the tails begin, increasing; `auto` chooses them by predicted time on this machine."""
    clusters: Any
    """For `auto`: the number of tails, or `auto` for the fewest of 1 to 3 that come within 2 % of the fastest."""
    objective: Objective
    """For `auto`: the layer as it is built, or the paper's equal widths (for its figures)."""
    head_coverage: Annotated[float, Range(above=0, below=1)]
    """For `auto`: least share of the training tokens in the head; a smaller head is faster and predicts worse."""
    cost_model: str | None
    """For `auto`: null measures this machine once, `flops` counts operations instead, or the PATH of a saved model."""

    def problems(self) -> Iterator[str]:
        cutoffs, clusters = self.cutoffs, self.clusters
        listed = isinstance(cutoffs, list) and all(type(c) is int and c > 0 for c in cutoffs)
        if cutoffs != "auto" and not (listed and all(a < b for a, b in pairwise(cutoffs))):
            yield (
                f"output.cutoffs must be auto or a list of increasing positive word ids; got {cutoffs!r}. "
                "Try output.cutoffs=auto"
            )
        if clusters != "auto" and not (type(clusters) is int and clusters >= 1):
            yield f"output.clusters must be auto or a number of tails from 1 on; got {clusters!r}. Try clusters=auto"


@dataclass
class DSoftmaxConfig(ClusteredConfig):
    """One softmax over all words; clusters see disjoint slices of the hidden state."""


@dataclass
class DSoftmaxStarConfig(ClusteredConfig):
    """One softmax over all words; tails see narrow projections of the hidden state."""


@dataclass
class AdaptiveConfig(ClusteredConfig):
    """Adaptive softmax: frequent words in the root, the others in tails that are opened only when needed."""

    shortlist: bool
    """Keep the head's words in the root; false makes the head a leaf, which the paper says costs 5 to 10 %."""
    head_bias: bool
    """A trained bias on the root, as torch's module offers it; the paper has none."""


@dataclass
class OptimConfig:
    """Adagrad with global-norm clipping."""

    lr: Annotated[float, Range(above=0)]
    schedule: Schedule
    clip: Annotated[float | None, Range(above=0)]
    """Largest global norm of the gradient; null for none."""
    weight_decay: Annotated[float, Range(least=0)]
    """L2 decay, added to the gradient after clipping."""
    embedding: EmbeddingForm

    def problems(self) -> Iterator[str]:
        # Lazy decay multiplies an idle row by 1 - lr wd / sqrt(1e-5) a step, which must stay positive.
        if self.embedding is EmbeddingForm.sparse and self.lr * self.weight_decay >= 3e-3:
            yield (
                f"optim.weight_decay must be below 0.003 / optim.lr ({3e-3 / self.lr:g}) with optim.embedding=sparse; "
                f"got {self.weight_decay:g}. Try optim.weight_decay=1e-6"
            )


# ---- running -----------------------------------------------------------------------------------------------------


@dataclass
class TrainerConfig:
    """Truncated back-propagation through time over contiguous streams."""

    batch_size: Count
    """Streams read in parallel."""
    bptt: Count
    """Steps through which gradients flow; the state is carried on."""
    reset_probability: Annotated[float, Range(least=0, below=1)]
    """Chance per step that a stream's state starts afresh from zero, as evaluation does; 0 carries it on for ever."""
    max_epochs: Annotated[int | None, Range(least=1), MayChange]
    max_steps: Annotated[int | None, Range(least=1), MayChange]
    max_tokens: Annotated[int | None, Range(least=1), MayChange]
    max_seconds: Annotated[float | None, Range(above=0), MayChange]
    """Seconds of training; evaluation has its own clock."""
    eval_every_steps: OptionalCount
    """Evaluate also every so many steps; every epoch's end is always evaluated."""
    eval_every_seconds: OptionalSeconds
    log_every_steps: Annotated[int, Range(least=1), MayChange]
    save_every_steps: Annotated[int | None, Range(least=1), MayChange]
    save_every_seconds: Annotated[float | None, Range(above=0), MayChange]
    """A checkpoint is also written at every evaluation and when the run is stopped."""
    device: Annotated[str, MayChange]
    """auto, cpu, cuda or cuda:N."""
    threads: Annotated[int | None, Range(least=1, below=4097), MayChange]
    """CPU threads; null for all cores, or one where a step is too small to be shared out."""

    def problems(self) -> Iterator[str]:
        if all(v is None for v in (self.max_epochs, self.max_steps, self.max_tokens, self.max_seconds)):
            yield (
                "trainer.max_epochs, max_steps, max_tokens and max_seconds must not all be null: the run would never "
                "end. Try trainer.max_epochs=5"
            )
        yield from _device_problems("trainer.device", self.device)


def _device_problems(key: str, device: str) -> Iterator[str]:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        yield f"{key} must be auto, cpu, cuda or cuda:N; got {device!r}. Try {key}=auto"


@dataclass
class EvaluateConfig:
    """How a split is scored; see `lm.scoring`."""

    streams: Count
    """Contiguous pieces the split is cut into; part of the figure's definition."""
    batch_size: Annotated[int, Range(least=1), MayChange]
    """Pieces computed at once; cannot change a figure."""


@dataclass
class Config:
    """Everything `train.py` takes."""

    data: DataConfig
    model: ModelConfig
    output: OutputConfig
    optim: OptimConfig
    trainer: TrainerConfig
    evaluate: EvaluateConfig
    seed: Annotated[int, Range(least=0)]
    """Weights, dropout and sampling are functions of it and of the step."""
    run_dir: Annotated[str | None, MayChange]
    """Where the run writes; null makes a fresh, readable name under runs/."""
    resume: Annotated[str | None, MayChange]
    """null starts afresh; `auto` continues; a run directory or checkpoint continues that one."""

    def problems(self) -> Iterator[str]:
        for key in ("run_dir", "resume"):
            if getattr(self, key) == "":
                yield f"{key} must not be empty. Try {key}=null"
        if self.optim.schedule is Schedule.halve_after_half and self.trainer.max_epochs is None:
            yield (
                "optim.schedule=halve_after_half needs trainer.max_epochs, whose half it halves after; got null. "
                "Try trainer.max_epochs=10"
            )


@dataclass
class OtherTextConfig:
    """Text other than the run's own corpus, read by the run's rules and with its vocabulary."""

    dir: str | None
    """Folder with any of train.txt, valid.txt, test.txt; null evaluates the run's corpus."""


@dataclass
class EvaluateCommandScoring:
    """As `evaluate` in training."""

    streams: OptionalCount
    """null takes the run's own."""
    batch_size: Count


SPLIT_NAMES = ("train", "valid", "test")


@dataclass
class EvaluateCommandConfig:
    """Everything `evaluate.py` takes."""

    checkpoint: str | None
    """A run directory or a checkpoint file."""
    data: OtherTextConfig
    splits: list[str]
    """Of train, valid and test."""
    evaluate: EvaluateCommandScoring
    device: str
    json: str | None
    """Where the figures are written; null writes evaluation.json beside the checkpoint."""

    def problems(self) -> Iterator[str]:
        if not self.checkpoint:
            yield ("checkpoint must name a run directory or a checkpoint file; got nothing. Try checkpoint=runs/NAME")
        if not self.splits or set(self.splits) - set(SPLIT_NAMES):
            yield f"splits must be a list of {', '.join(SPLIT_NAMES)}; got {self.splits}. Try splits=[valid,test]"
        yield from _device_problems("device", self.device)


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
