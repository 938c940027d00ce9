"""Settings of the commands that use trained models, with their defaults."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from lm.config.groups import DataConfig, EncodingErrors
from lm.config.rules import Count, OptionalCount, Range
from lm.config.schema import device_problems


class Which(Enum):
    """The checkpoints that a run keeps."""

    last = "last"
    best = "best"


class CacheKind(Enum):
    """How a cache weighs the words it holds."""

    unigram = "unigram"
    continuous = "continuous"


@dataclass(kw_only=True)
class ModelChoice:
    """The model that a command uses: that of a run, perhaps mixed with others, perhaps with a cache."""

    checkpoint: str | None = None
    """A run directory or a checkpoint file."""
    which: Which = Which.last
    """Of a run directory: the weights of the `last` step, or those with the `best` validation perplexity."""
    verify: bool = True
    """Compare checkpoints and corpora with their checksums while reading; false is faster for large ones."""
    mix: list[str] = field(default_factory=list)
    """Other runs whose models are mixed with it, word by word."""
    weights: list[float] | None = None
    """Of the checkpoint and of each run in `mix`; null fits them to the validation text."""
    cache: CacheKind | None = None
    """`unigram` makes the last words likelier; `continuous` those that followed similar hidden states."""
    cache_size: OptionalCount = None
    """Words that the cache holds; null chooses on the validation text, as for the next three."""
    cache_decay: Annotated[float | None, Range(above=0, most=1)] = None
    """For `unigram`: by how much a word's share falls with each word read after it; 1 for not at all."""
    cache_theta: Annotated[float | None, Range(least=0)] = None
    """For `continuous`: how sharply similar hidden states are preferred."""
    cache_weight: Annotated[float | None, Range(above=0, below=1)] = None
    """The cache's part of the probability."""
    cache_boundary: str | None = None
    """A word that empties the cache, where documents end; null never does."""

    def model_problems(self) -> Iterator[str]:
        if not self.checkpoint:
            yield "checkpoint must name a run directory or a checkpoint file; got nothing. Try checkpoint=runs/NAME"
        number = 1 + len(self.mix)
        if self.weights is not None and (
            len(self.weights) != number or min(self.weights) < 0 or abs(sum(self.weights) - 1) > 1e-6
        ):
            yield (
                f"weights must be {number} numbers of at least 0 that sum to one, for the checkpoint and each run of "
                f"mix; got {self.weights}. Try weights=null, which fits them"
            )
        owners = {"decay": [CacheKind.unigram], "theta": [CacheKind.continuous]}
        for name in ("size", "decay", "theta", "weight", "boundary"):
            kinds = owners.get(name, list(CacheKind))
            if getattr(self, f"cache_{name}") is not None and self.cache not in kinds:
                names, got = [kind.value for kind in kinds], "null" if self.cache is None else self.cache.value
                yield f"cache_{name} belongs to cache={' or '.join(names)}; got cache={got}."


@dataclass
class MixtureConfig:
    """What is remembered of models that were mixed, or given a cache, and kept as a run."""

    data: DataConfig
    runs: list[str]
    """Where the models came from; their checkpoints are copied into that of the mixture."""
    weights: list[float]
    """Of each run."""
    streams: Count
    """As `evaluate.streams` of the first run."""
    cache: CacheKind | None
    """null for none; this and the next ones are as in `ModelChoice`."""
    cache_size: OptionalCount
    """Words that it holds."""
    cache_sharpness: Annotated[float | None, Range(least=0)]
    """decay or theta."""
    cache_weight: Annotated[float | None, Range(above=0, below=1)]
    """Its part of the probability."""
    cache_boundary: str | None
    """The word that empties it."""


class Mode(Enum):
    """What `evaluate.py` computes."""

    perplexity = "perplexity"
    score = "score"
    topk = "topk"
    projector = "projector"


class LineState(Enum):
    """Where the reading of a line of the input begins."""

    reset = "reset"
    carried = "carried"


class LineFormat(Enum):
    """How the result for a line of the input is written."""

    tsv = "tsv"
    jsonl = "jsonl"
    nbest = "nbest"


class BestOf(Enum):
    """Which lines of an n-best list are of the same utterance."""

    same = "same"
    numbered = "numbered"


SPLIT_NAMES = ("train", "valid", "test")


@dataclass
class TextFolderConfig:
    """Text other than the run's own corpus, read by the run's rules and with its vocabulary."""

    dir: str | None = None
    """Folder with any of train.txt, valid.txt, test.txt, as for data=text; null evaluates the run's corpus."""
    encoding_errors: EncodingErrors = EncodingErrors.strict
    """Its bytes that are no text: strict refuses the file, naming the first; replace makes them U+FFFD."""


@dataclass
class ScoringOverrides:
    """As `evaluate` in training."""

    streams: OptionalCount = None
    """null takes the run's own."""
    batch_size: Count = 64
    """Pieces of a split, or lines of the input, computed at once; cannot change a figure."""
    normalize: bool = True
    """false takes the scores of output=self_normalized or nce for log-probabilities, which is many times faster."""


@dataclass
class EvaluateConfig(ModelChoice):
    """Everything `evaluate.py` takes."""

    mode: Mode = Mode.perplexity
    """`perplexity` of splits; `score`: log-probabilities of each line of a text; `topk`: the likeliest next words;
    `projector`: word embeddings for TensorBoard."""
    data: TextFolderConfig = field(default_factory=TextFolderConfig)
    splits: list[str] = field(default_factory=lambda: ["valid", "test"])
    """Of train, valid and test."""
    evaluate: ScoringOverrides = field(default_factory=ScoringOverrides)
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    json: str | None = None
    """Where the perplexities are written; null names a file in the run directory by what was evaluated."""
    input: str | None = None
    """For `score` and `topk`: a text file, a sentence a line, or `-` for standard input."""
    prompt: str | None = None
    """For `topk`: one text to go on from, instead of `input`."""
    state: LineState = LineState.reset
    """For `score`: each line starts from a zero state (`reset`, as for n-best lists) or continues (`carried`)."""
    k: Count = 10
    """For `topk`: how many words."""
    words: Count = 2000
    """For `projector`: how many, the most frequent ones."""
    format: LineFormat = LineFormat.tsv
    """For `score` and `topk`: `tsv` or `jsonl`. `nbest`, for `score`: both input and output are an n-best list."""
    lm_weight: float = 1.0
    """For `nbest`: what our log-probability is multiplied by before it is added to the other scores."""
    word_penalty: float = 0.0
    """For `nbest`: what each word takes from the total."""
    best: BestOf | None = None
    """For `nbest`: write only the best line of each utterance: of the `same` id, or of ids `numbered` id-1, id-2."""
    out: str | None = None
    """For `score` and `topk`: the file to write, null for standard output. For `perplexity`: a directory in which the
    mixture or the cached model is kept as a run."""

    def problems(self) -> Iterator[str]:
        yield from self.model_problems()
        yield from self._input_problems()
        if not self.splits or set(self.splits) - set(SPLIT_NAMES):
            yield f"splits must be a list of {', '.join(SPLIT_NAMES)}; got {self.splits}. Try splits=[valid,test]"
        yield from device_problems("device", self.device)

    def _input_problems(self) -> Iterator[str]:
        """What is read and written must be of use to the mode."""
        mode, asks = self.mode.value, f"mode={self.mode.value} reads"
        if self.mode in (Mode.perplexity, Mode.projector):
            for key in ("input", "prompt"):
                if getattr(self, key) is not None:
                    yield f"{key} is not a setting of mode={mode}; it belongs to mode=score or mode=topk."
            if self.out is not None and (self.mode is Mode.projector or not (self.mix or self.cache)):
                yield f"out is for mode=score and mode=topk, or keeps what mix or cache make; got {self.out!r}."
            if self.out is not None and self.data.dir is not None:
                yield "out keeps a run with the figures of its own corpus, not those of data.dir. Leave one of them out"
            if self.mode is Mode.projector and (self.mix or self.cache):
                yield "mix and cache are not settings of mode=projector, which shows the vectors of one model."
            return
        if self.mode is Mode.score and self.prompt is not None:
            yield "prompt is not a setting of mode=score; it belongs to mode=topk. Try input=FILE"
        elif not self.input and self.prompt is None:
            wanted = "input=FILE, or input=- for standard input"
            yield f"{asks} a text; got none. Try {wanted}{', or prompt=TEXT' if mode == 'topk' else ''}"
        elif self.input and self.prompt is not None:
            yield f"{asks} input or prompt; got both. Leave one out"
        if self.format is not LineFormat.nbest and self.best is not None:
            yield f"best belongs to format=nbest; got format={self.format.value}."
        if self.format is LineFormat.nbest and (self.mode is Mode.topk or self.state is LineState.carried):
            yield "format=nbest belongs to mode=score with state=reset: every line stands for itself."
        if self.mode is Mode.topk and self.state is LineState.carried:
            yield "state=carried belongs to mode=score; mode=topk reads each line from a zero state."
        if self.data.dir is not None or self.json is not None:
            yield f"data.dir and json belong to mode=perplexity; {asks} input and writes to out=FILE."
        if self.out == "":
            yield "out must not be empty. Try out=null"


@dataclass
class GenerateConfig(ModelChoice):
    """Everything `python -m lm.generate` takes."""

    prompt: str | None = None
    """Text to go on from; null begins with a new sentence."""
    samples: Count = 1
    """Texts to write."""
    max_words: Count = 100
    """Length of each, punctuation and sentence ends included, the prompt not; pieces count where a run has those."""
    max_sentences: OptionalCount = None
    """Sentences after which each text ends, if that comes first."""
    temperature: Annotated[float, Range(least=0)] = 1.0
    """1 draws as the model believes; below 1 plays safe; 0 always takes the likeliest word."""
    top_k: OptionalCount = None
    """Draw from this many of the likeliest words."""
    top_p: Annotated[float | None, Range(above=0, most=1)] = None
    """Draw from the fewest likeliest words that hold this share of the probability."""
    unknown_words: bool = False
    """Whether `<unk>` may be drawn."""
    seed: Annotated[int, Range(least=0)] = 1
    """The same seed writes the same texts; the n-th text does not depend on how many are asked for."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    def problems(self) -> Iterator[str]:
        yield from self.model_problems()
        yield from device_problems("device", self.device)
