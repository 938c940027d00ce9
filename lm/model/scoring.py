"""Exact perplexity of a split, independent of the batch size.

A split is cut into `streams` contiguous spans. Each span except the first is warmed up on the preceding tokens, which
it does not score; the first starts from `</s>` and a zero state. Every token is scored exactly once. The number of
spans is part of the metric's definition and is printed with it; the batch size is not. With `BY_LINES` streams, every
line is a span without warm-up (`data.sequences=lines`).

Shapes: T steps, B spans in a batch.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.data.batches import line_bounds
from lm.data.corpus import SplitText
from lm.data.text.vocabulary import KNOWN, WORD_END, Vocabulary
from lm.model.base import State, repeat_stream
from lm.model.predictor import Predictions, Predictor
from lm.output.base import IGNORE_INDEX
from lm.system.console import Progress
from lm.system.interrupt import Stopped, StopRequest
from lm.system.ranks import Ranks

BY_LINES = 0
"""Value of `streams` for one span per line."""
WARM_UP = 128
"""Minimum number of preceding tokens that give a span's state context; see `Predictor.looks_back`."""
CHUNK_STEPS, CHUNK_TOKENS = 64, 1024
"""Minimum steps and tokens per chunk; chunks bound the output layer's memory."""

Span = tuple[int, int, int]
"""(start of reading, start of scoring, end)."""


class InWords(NamedTuple):
    """Whole words and `</s>`, when the scored tokens are subwords."""

    words: int
    known_words: int
    """Number of words that are in the word-level vocabulary."""
    known_nll: float
    """Negative log-likelihood of their subwords."""


@dataclass(frozen=True)
class Score:
    """Score of a split; negative log-likelihoods are sums in nats."""

    tokens_V: NDArray[np.int64]
    """Number of times each word is a target."""
    nll_V: NDArray[np.float64]
    """Negative log-likelihood by target word."""
    unk_id: int
    streams: int
    """Number of spans, or `BY_LINES`."""
    seconds: float
    cutoffs: Sequence[int]
    """Word ids at which the output layer's clusters begin, if any."""
    in_words: InWords | None = None
    """Word-level totals, if the tokens are subwords."""

    @property
    def tokens(self) -> int:
        return int(self.tokens_V.sum())

    @property
    def nll(self) -> float:
        return float(self.nll_V.sum())

    @property
    def loss(self) -> float:
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        return perplexity(self.nll, self.tokens)

    @property
    def perplexity_without_unk(self) -> float:
        """Perplexity per word over the word-level vocabulary; comparable between word and subword runs."""
        if self.in_words is not None:
            return perplexity(self.in_words.known_nll, self.in_words.known_words)
        known = np.arange(len(self.nll_V)) != self.unk_id
        return perplexity(float(self.nll_V[known].sum()), int(self.tokens_V[known].sum()))

    @property
    def oov_rate(self) -> float:
        """Fraction of words outside the word-level vocabulary."""
        if self.in_words is not None:
            return 1 - self.in_words.known_words / self.in_words.words
        return int(self.tokens_V[self.unk_id]) / self.tokens

    def of_words(self, first: int, end: int) -> tuple[int, float]:
        """Token count and negative log-likelihood of targets with ids in [first, end)."""
        return int(self.tokens_V[first:end].sum()), float(self.nll_V[first:end].sum())

    def by_cluster(self) -> dict[str, float]:
        """Each cluster's token share and loss, by tag; empty for layers without cutoffs, nan without tokens."""
        metrics = {}
        edges = [0, *self.cutoffs, len(self.nll_V)] if self.cutoffs else []
        for number, (first, end) in enumerate(pairwise(edges)):
            tokens, nll = self.of_words(first, end)
            metrics[f"output/cluster_{number}/share"] = tokens / self.tokens
            metrics[f"output/cluster_{number}/loss"] = nll / tokens if tokens else math.nan
        return metrics

    def as_dict(self) -> dict[str, Any]:
        return {
            "perplexity": self.perplexity,
            "perplexity_without_unk": self.perplexity_without_unk,
            "oov_rate": self.oov_rate,
            "tokens": self.tokens,
            "streams": self.streams,
            "tokens_per_second": self.tokens / self.seconds,
        }


def perplexity(nll: float, tokens: int) -> float:
    """exp(nll / tokens); inf on overflow, nan without tokens."""
    if tokens == 0:
        return math.nan
    return math.exp(nll / tokens) if nll / tokens < 700 else math.inf


def score(model: Predictor, text: SplitText, vocabulary: Vocabulary, *, streams: int, **reading: Any) -> Score:
    """Score every token of a split once; `reading` holds further options of `token_nll`."""
    began = time.monotonic()
    nll = token_nll(model, text.tokens, streams=streams, eos_id=vocabulary.eos_id, **reading)
    return score_of(nll, text, vocabulary, model=model, streams=streams, seconds=time.monotonic() - began)


@torch.no_grad()
def token_nll(
    model: Predictor,
    tokens: NDArray[Any],
    *,
    streams: int,
    batch_size: int,
    eos_id: int,
    label: str,
    stop: StopRequest | None = None,
    ranks: Ranks | None = None,
    of: Callable[[Any, Tensor], Tensor] = lambda predictions, targets_TB: predictions.nll(targets_TB),
) -> NDArray[np.float64]:
    """Return the negative log-likelihood of each token; raises Stopped if a signal arrives on any rank.

    `of` may return additional values from the predictions, (..., T, B). Ranks split the streams.
    """
    ranks = ranks or Ranks()
    spans = spans_of(tokens, streams, eos_id=eos_id, warm_up=max(WARM_UP, model.looks_back))[ranks.rank :: ranks.size]
    batches = [spans[i : i + batch_size] for i in range(0, len(spans), batch_size)]
    num_steps = sum(max(end - warm for warm, _, end in batch) for batch in batches)

    def measure(predictions: Predictions, targets_TB: Tensor) -> Tensor:
        progress.advance(len(targets_TB))
        return of(predictions, targets_TB)

    was_training = model.training
    model.eval()
    with Progress(num_steps, label=label, unit="steps") as progress:
        values, _ = measure_spans(model, tokens, batches, measure=measure, stop=stop, eos_id=eos_id)
    model.train(was_training)
    if stop is not None and (signal := ranks.all_max(stop.signal)):
        raise Stopped(128 + signal)
    return ranks.sum(torch.from_numpy(values).to(model.device)).cpu().numpy() if ranks.size > 1 else values


def measure_spans(
    model: Predictor,
    tokens: NDArray[Any],
    batches: Sequence[Sequence[Span]],
    *,
    measure: Callable[[Any, Tensor], Tensor],
    state: State | None = None,
    stop: StopRequest | None = None,
    **options: Any,
) -> tuple[NDArray[np.float64], State | None]:
    """Return the values of each token, (..., tokens), and the state after the last batch; incomplete after `stop`.

    `measure` maps predictions and targets (T, B) to values (..., T, B); `options` are those of `read_spans`.
    """
    found, after = np.zeros(len(tokens)), state
    for batch in batches:
        chunks = []
        for predictions, targets_TB, after in read_spans(model, tokens, batch, state=state, **options):
            if stop:
                return found, after
            chunks.append(measure(predictions, targets_TB).double().cpu())
        values = torch.cat(chunks, -2).numpy()
        if found.shape[:-1] != values.shape[:-2]:
            found = np.zeros((*values.shape[:-2], len(tokens)))
        for b, (warm, start, end) in enumerate(batch):
            found[..., start:end] = values[..., start - warm : end - warm, b]
    return found, after


def score_of(
    nll: NDArray[np.float64], text: SplitText, vocabulary: Vocabulary, *, model: Predictor, streams: int, seconds: float
) -> Score:
    """Build a split's score from the negative log-likelihood of each token."""
    tokens_V = np.bincount(text.tokens, minlength=model.vocab_size)
    nll_V = np.bincount(text.tokens, weights=nll, minlength=model.vocab_size).astype(np.float64)
    marks, in_words = text.marks, None
    if marks is not None:
        known_words, known_nll = np.count_nonzero(marks == KNOWN | WORD_END), nll[(marks & KNOWN) != 0].sum()
        in_words = InWords(int(np.count_nonzero(marks & WORD_END)), int(known_words), float(known_nll))
    return Score(tokens_V, nll_V, vocabulary.unk_id, streams, max(seconds, 1e-9), model.cutoffs, in_words)


def read_spans(
    model: Predictor,
    tokens: NDArray[Any],
    spans: Sequence[Span],
    *,
    eos_id: int,
    state: State | None = None,
    inputs: NDArray[Any] | None = None,
) -> Iterator[tuple[Predictions, Tensor, State]]:
    """Read spans in parallel, in chunks; yield predictions, their targets and the state after them.

    Each starts from `state`, that of one stream. `inputs` are ids for the model to read if they differ from the tokens.
    """
    device = model.device
    inputs_TB, targets_TB = lay_out(tokens, spans, eos_id=eos_id, inputs=inputs)
    state = model.initial_state(len(spans)) if state is None else repeat_stream(state, len(spans))
    steps = model.segment or max(CHUNK_STEPS, CHUNK_TOKENS // len(spans))
    for first in range(0, len(inputs_TB), steps):
        words, targets = (t[first : first + steps].to(device, non_blocking=True) for t in (inputs_TB, targets_TB))
        predictions, state = model.read(words, state)
        yield predictions, targets, state


def spans_of(tokens: NDArray[Any], streams: int, *, eos_id: int, warm_up: int) -> list[Span]:
    """Cut a split into contiguous spans, none empty, or into lines from the longest to the shortest."""
    if streams == BY_LINES:
        starts, lengths = line_bounds(tokens, eos_id=eos_id)
        order = np.argsort(-lengths, kind="stable")
        return [(a, a, a + n) for a, n in zip(starts[order].tolist(), lengths[order].tolist(), strict=True)]
    streams = min(streams, len(tokens))
    bounds = [len(tokens) * i // streams for i in range(streams + 1)]
    return [(max(0, start - warm_up), start, end) for start, end in pairwise(bounds)]


def lay_out(
    tokens: NDArray[Any], spans: Sequence[Span], *, eos_id: int, inputs: NDArray[Any] | None = None
) -> tuple[Tensor, Tensor]:
    """Arrange spans as (T, B) inputs and targets; warm-up and padding are not scored."""
    inputs = tokens if inputs is None else inputs
    shape = max(end - warm for warm, _, end in spans), len(spans)
    inputs_TB, targets_TB = np.full(shape, eos_id, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
    for b, (warm, start, end) in enumerate(spans):
        # Each token's input is the previous token; the first token's input is `</s>`.
        skip = 1 if warm == 0 else 0
        inputs_TB[skip : end - warm, b] = inputs[warm + skip - 1 : end - 1]
        targets_TB[start - warm : end - warm, b] = tokens[start:end]
    return torch.from_numpy(inputs_TB), torch.from_numpy(targets_TB)
