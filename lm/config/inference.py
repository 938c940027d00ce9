"""Settings of the commands that use trained models, with their defaults."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

from lm.config.groups import SPLITS, Count, DataConfig, EncodingErrors, MayBeEmpty, OptionalCount, OptionalRate, Range
from lm.config.schema import device_problems

BestOf = Literal["same", "numbered"]
CacheKind = Literal["unigram", "continuous"]
DynamicKind = Literal["sgd", "rms"]
Which = Literal["last", "best"]


@dataclass(kw_only=True)
class CheckpointChoice:
    """The checkpoint that a command uses."""

    checkpoint: str | None = None
    """A run directory or a checkpoint file."""
    which: Which = "last"
    """Checkpoint of a run directory: `last` step, or `best` validation perplexity."""
    verify: bool = True
    """Check the checksums of checkpoints and corpora; false starts faster with large files."""

    def problems(self) -> Iterator[str]:
        if not self.checkpoint:
            yield "checkpoint must name a run directory or a checkpoint file; got nothing. Try checkpoint=runs/NAME."


@dataclass(kw_only=True)
class ModelChoice(CheckpointChoice):
    """The model that a command uses: a checkpoint, optionally mixed with others and with a cache."""

    mix: list[str] = field(default_factory=list)
    """Runs to interpolate with."""
    weights: list[float] | None = None
    """Interpolation weights of the checkpoint and each run in `mix`; null fits them to the validation text by EM."""
    cache: CacheKind | None = None
    """`unigram`: recent words; `continuous`: words that followed similar hidden states."""
    cache_size: OptionalCount = None
    """Words in the cache; null tunes it on the validation text."""
    cache_decay: Annotated[float | None, Range(above=0, most=1)] = None
    """Decay per word of `cache=unigram`; 1 for none, null tunes it."""
    cache_theta: Annotated[float | None, Range(least=0)] = None
    """Inverse temperature of `cache=continuous`; null tunes it."""
    cache_weight: Annotated[float | None, Range(above=0, below=1)] = None
    """Interpolation weight of the cache; null tunes it."""
    cache_boundary: str | None = None
    """Word that empties the cache, for example at the end of documents; null for none."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N; auto prefers a GPU."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        number = 1 + len(self.mix)
        if self.weights is not None and (
            len(self.weights) != number or min(self.weights) < 0 or abs(sum(self.weights) - 1) > 1e-6
        ):
            yield (
                f"weights must be {number} numbers of at least 0 that sum to one, for the checkpoint and each run of "
                f"mix; got {self.weights}. Try weights=null, which fits them."
            )
        owners = {"decay": ("unigram",), "theta": ("continuous",)}
        for name in ("size", "decay", "theta", "weight", "boundary"):
            kinds = owners.get(name, get_args(CacheKind))
            if getattr(self, f"cache_{name}") is not None and self.cache not in kinds:
                yield f"cache_{name} belongs to cache={' or '.join(kinds)}; got cache={self.cache or 'null'}."
        yield from device_problems("device", self.device)


@dataclass
class MixtureConfig:
    """Settings of a mixture or cached model that was saved as a run."""

    data: DataConfig
    runs: list[str]
    """The mixed runs; the mixture's checkpoint contains copies of theirs."""
    weights: list[float]
    """Interpolation weight of each run."""
    streams: Annotated[int, Range(least=0)]
    """Same as `evaluate.streams` of the first run; 0 if lines are scored one by one."""
    cache: CacheKind | None
    """As in `ModelChoice`; null for none."""
    cache_size: OptionalCount
    """Words in the cache."""
    cache_sharpness: Annotated[float | None, Range(least=0)]
    """Tuned `cache_decay` or `cache_theta`."""
    cache_weight: Annotated[float | None, Range(above=0, below=1)]
    """Interpolation weight of the cache."""
    cache_boundary: str | None
    """Word that empties the cache."""


@dataclass
class TextFolderConfig:
    """Other text than the run's corpus, with the run's tokenization and vocabulary."""

    dir: str | None = None
    """Folder with any of train.txt, valid.txt, test.txt, as for data=text; null evaluates the run's corpus."""
    encoding_errors: EncodingErrors = "strict"
    """Invalid bytes: strict rejects the file and names the first one; replace substitutes U+FFFD."""


@dataclass
class ScoringOverrides:
    """How splits and lines are scored."""

    streams: OptionalCount = None
    """Contiguous pieces that a split is cut into; null for the run's own number."""
    batch_size: Count = 64
    """Pieces of a split, or lines, scored in parallel; does not change the result."""
    max_tokens: OptionalCount = None
    """For `perplexity`: score only the first tokens of a split; null for all. Unit conversions use the whole split."""
    normalize: bool = True
    """false treats the scores of output=self_normalized or nce as log-probabilities: many times faster."""
    dynamic: DynamicKind | None = None
    """Dynamic evaluation: keep learning from the text, in order, after scoring it; by `sgd`, or by `rms`: scaled by the
    gradients of the training text, with decay to the trained weights."""
    dynamic_segment: Count = 20
    """Tokens between updates; shorter segments are slower and often better."""
    dynamic_lr: Annotated[float | None, Range(least=0)] = None
    """Learning rate; null tunes it on the start of the validation text."""
    dynamic_decay: OptionalRate = None
    """Decay per segment to the trained weights, for `rms`; null tunes it."""


@dataclass
class EvaluateConfig(ModelChoice):
    """Settings of `evaluate.py`."""

    mode: Literal["perplexity", "score", "surprisal", "topk", "projector"] = "perplexity"
    """`perplexity` of splits; `score`: log-probabilities of lines; `surprisal`: a table of tokens; `topk`: most likely
    next words; `projector`: word embeddings for TensorBoard."""
    data: TextFolderConfig = field(default_factory=TextFolderConfig)
    splits: list[str] = field(default_factory=lambda: ["valid", "test"])
    """Any of train, valid and test."""
    evaluate: ScoringOverrides = field(default_factory=ScoringOverrides)
    json: str | None = None
    """File for the perplexities; null for one in the run directory, named after what was evaluated."""
    input: str | None = None
    """For `score`, `surprisal` and `topk`: a text file with a sentence per line, or `-` for standard input."""
    prompt: Annotated[str | None, MayBeEmpty] = None
    """For `topk`: one text instead of `input`."""
    state: Literal["reset", "carried"] = "reset"
    """For `score` and `surprisal`: each line starts from a zero state (`reset`) or continues (`carried`)."""
    adapt: bool = False
    """For `surprisal`: learn from each sentence after scoring it, by `evaluate.dynamic` (default: sgd)."""
    k: Count = 10
    """For `topk`: number of words."""
    words: Count = 2000
    """For `projector`: number of most frequent words to show."""
    format: Literal["tsv", "jsonl", "nbest", "kaldi"] = "tsv"
    """For `score`, `surprisal` and `topk`: `tsv` or `jsonl`. For `score` also `nbest` (rescored n-best lists)
    and `kaldi` (sentence scores: the id, then the negative log-likelihood of each word and of `</s>`)."""
    lm_weight: float = 1.0
    """For `nbest`: weight of our log-probability beside the other scores."""
    word_penalty: float = 0.0
    """For `nbest`: penalty subtracted per word."""
    score_weights: list[float] = field(default_factory=list)
    """For `nbest`: weights of the other scores, in the order of the list; missing weights are 1."""
    best: BestOf | None = None
    """For `nbest`: write only the best line of each utterance: lines with the `same` id, or `numbered` id-1, id-2."""
    references: str | None = None
    """For `nbest`: file with an utterance's id and words per line; prints the word error rate."""
    tune: bool = False
    """For `nbest`: find the weights and word_penalty with the lowest word error rate, and use them."""
    out: str | None = None
    """Output file of `score`, `surprisal` and `topk`; null for standard output. For `perplexity`: directory in which to
    keep the mixture or cached model as a run."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self._input_problems()
        yield from self._nbest_problems()
        yield from self._dynamic_problems()
        if not self.splits or set(self.splits) - set(SPLITS):
            yield f"splits must be a list of {', '.join(SPLITS)}; got {self.splits}. Try splits=[valid,test]."

    @property
    def dynamic(self) -> DynamicKind | None:
        """How the model learns from the text it reads; None if it does not."""
        return self.evaluate.dynamic or ("sgd" if self.adapt else None)

    def _dynamic_problems(self) -> Iterator[str]:
        scoring, kind = self.evaluate, self.dynamic
        if self.adapt and (self.mode != "surprisal" or self.state == "carried" or self.mix or self.cache):
            yield "adapt=true needs mode=surprisal with state=reset, and a single model without mix and cache."
            return
        if scoring.dynamic_decay is not None and kind != "rms":
            yield f"evaluate.dynamic_decay belongs to evaluate.dynamic=rms; got {kind or 'null'}."
        if kind is None:
            if scoring.dynamic_lr is not None:
                yield "evaluate.dynamic_lr belongs to evaluate.dynamic=sgd or rms; got null."
            return
        if scoring.streams not in (None, 1):
            yield (
                "evaluate.streams must be 1 with evaluate.dynamic, which reads a text in order; got "
                f"{scoring.streams}. Try evaluate.streams=1."
            )
        in_order = self.mode == "perplexity" or (self.mode, self.state) == ("score", "carried")
        if not in_order and not self.adapt:
            yield "evaluate.dynamic needs mode=perplexity, mode=score with state=carried, or adapt=true."
        if not scoring.normalize:
            yield "evaluate.dynamic needs normalized scores. Try evaluate.normalize=true."
        if self.out is not None and self.mode == "perplexity":
            yield "out keeps a model as a run, but evaluate.dynamic changes it while it reads. Leave one out."

    def _input_problems(self) -> Iterator[str]:
        """Explain settings that do not fit the mode."""
        mode, reads = self.mode, f"mode={self.mode} reads"
        if self.mode in ("perplexity", "projector"):
            for key in ("input", "prompt"):
                if getattr(self, key) is not None:
                    yield f"{key} is not a setting of mode={mode}; it belongs to mode=score, surprisal or topk."
            if self.out is not None and (self.mode == "projector" or not (self.mix or self.cache)):
                yield f"out needs mode=score, surprisal or topk, or mix or cache; got {self.out!r}."
            if self.out is not None and (self.data.dir is not None or self.evaluate.max_tokens is not None):
                yield (
                    "out keeps a run with the perplexities of its corpus, not those of data.dir or of "
                    "evaluate.max_tokens. Leave one out."
                )
            if self.mode == "projector" and (self.mix or self.cache):
                yield "mix and cache are not settings of mode=projector, which shows the embeddings of one model."
            return
        if self.mode != "topk" and self.prompt is not None:
            yield f"prompt is not a setting of mode={mode}; it belongs to mode=topk. Try input=FILE."
        elif not self.input and self.prompt is None:
            wanted = "input=FILE, or input=- for standard input"
            yield f"{reads} a text; got none. Try {wanted}{', or prompt=TEXT' if mode == 'topk' else ''}."
        elif self.input and self.prompt is not None:
            yield f"{reads} input or prompt; got both. Leave one out."
        if self.mode == "topk" and self.state == "carried":
            yield "state=carried belongs to mode=score or surprisal; mode=topk reads each line from a zero state."
        if self.data.dir is not None or self.json is not None:
            yield f"data.dir and json belong to mode=perplexity; {reads} input and writes to out=FILE."

    def _nbest_problems(self) -> Iterator[str]:
        carried = self.state == "carried"
        given = {"best": self.best is not None, "references": self.references is not None, "tune": self.tune}
        weights = {"lm_weight": self.lm_weight != 1, "word_penalty": self.word_penalty != 0}
        given |= weights | {"score_weights": bool(self.score_weights)}
        allowed = {"nbest": set(given), "kaldi": {"best", *weights} if carried else set()}.get(self.format, set())
        for key in given:
            if given[key] and key not in allowed:
                yield f"{key} belongs to mode=score format=nbest; got mode={self.mode} format={self.format}."
        if self.format not in ("nbest", "kaldi"):
            return
        if self.mode != "score":
            yield f"format={self.format} needs mode=score; got mode={self.mode}."
        if self.best is None and (self.references is not None or carried):
            yield "references and state=carried need best=same or best=numbered, which group lines into utterances."
        if self.tune and (self.references is None or carried):
            yield "tune=true needs references=FILE and state=reset."


@dataclass
class GenerateConfig(ModelChoice):
    """Settings of `python -m lm.generate`."""

    prompt: Annotated[str | None, MayBeEmpty] = None
    """Text to continue; null starts a new sentence."""
    samples: Count = 1
    """Number of texts."""
    max_words: Count = 100
    """Maximum length of each text in tokens, without the prompt."""
    max_sentences: OptionalCount = None
    """Maximum number of sentences of each text."""
    temperature: Annotated[float, Range(least=0, most=1e6)] = 1.0
    """Sampling temperature; 0 for greedy decoding."""
    top_k: OptionalCount = None
    """Sample from this many of the most likely words."""
    top_p: Annotated[float | None, Range(above=0, most=1)] = None
    """Nucleus sampling: sample from the fewest words that have this total probability."""
    unknown_words: bool = False
    """Allow `<unk>` in the output."""
    seed: Annotated[int, Range(least=0)] = 1
    """Sampling seed; the n-th text does not depend on `samples`."""


@dataclass
class ExportConfig(CheckpointChoice):
    """Settings of `python -m lm.export`."""

    out: str | None = None
    """File to write; the vocabulary is written next to it."""
    format: Literal["onnx", "torch"] = "onnx"
    """`onnx`, or `torch`: a program of `torch.export`."""
    scores: Literal["all", "targets", "topk"] = "all"
    """For `onnx`: log-probabilities of `all` words, of given `targets`, or of the `topk` most likely words."""
    k: Count = 10
    """For `scores=topk`: number of words."""
    quantize: Literal["int8"] | None = None
    """For `onnx`: `int8` stores matrices as int8 with a scale per row; null stores float32."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.out or (Path(self.out).exists() and not Path(self.out).is_file()):
            got = self.out or "nothing"
            yield f"out must name the file to write, next to the vocabulary; got {got}. Try out=model.onnx."
        if self.format == "torch" and (self.scores != "all" or self.quantize is not None):
            yield "scores and quantize belong to format=onnx; got format=torch. Leave them out."
