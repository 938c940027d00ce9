"""`evaluate.py mode=score` and `mode=topk`: log-probabilities of lines, and the likeliest words after them.

Shapes: T steps, B lines side by side, k words.
"""

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray

from lm.config.groups import DataConfig
from lm.config.inference import EvaluateConfig, LineFormat, LineState
from lm.data.settings import rule_of
from lm.data.text.vocabulary import EOS, UNK, Vocabulary
from lm.inference.lines import (
    LineBlock,
    json_line,
    make_block,
    make_blocks,
    read_prompt,
    read_words,
    with_progress,
    write_lines,
)
from lm.model.base import State
from lm.model.predictor import Predictor
from lm.model.scoring import Span, perplexity, read_spans
from lm.system.console import counted, printable, say

# ---- mode=score ------------------------------------------------------------------------------------------------------


def score_lines(config: EvaluateConfig, model: Predictor, vocabulary: Vocabulary, *, data: DataConfig) -> None:
    """Log-probabilities of each line and its tokens, then totals on stderr."""
    assert config.input is not None
    show, totals = _as_tsv if config.format is LineFormat.tsv else _as_json, Totals()
    lines = read_words(config.input, data=data, skip_empty=config.state is LineState.carried)
    write_lines((show(*found) for found in scored(lines, config, model, vocabulary, totals)), config.out)
    say(f"{totals}; state {config.state.value}", to=sys.stderr)


def scored(
    lines: Iterable[list[str]], config: EvaluateConfig, model: Predictor, vocabulary: Vocabulary, totals: "Totals"
) -> Iterator[tuple[list[str], NDArray[np.float64]]]:
    """The tokens of each line and their log-probabilities, which are counted in the totals."""
    carried, batch_size = config.state is LineState.carried, config.evaluate.batch_size
    scorer = LineScorer(model, eos_id=vocabulary.eos_id, carried=carried, batch_size=batch_size)
    blocks = make_blocks(lines, source=config.input or "-", vocabulary=vocabulary, reader=model)
    for block in with_progress(blocks, out=config.out):
        for ids, log_probs in zip(block.split(block.tokens), scorer.score(block), strict=True):
            words = vocabulary.decode(ids.tolist())
            totals.add(words, log_probs)
            yield words, log_probs


class LineScorer:
    """The natural log-probability of each token, `</s>` included.

    Each line is read from `</s>` and the zero state, many lines side by side. With `carried`, all lines are one text,
    read like a split of one stream.
    """

    def __init__(self, model: Predictor, *, eos_id: int, carried: bool, batch_size: int) -> None:
        self.model = model.eval()
        self.eos_id = eos_id
        self.carried = carried
        self.batch_size = batch_size
        self._state: State | None = None

    @torch.no_grad()
    def score(self, block: LineBlock) -> list[NDArray[np.float64]]:
        """The log-probabilities of each line's tokens."""
        log_probs = np.empty(len(block.tokens))
        if not self.carried:
            spans = block.spans()
            for batch in block.batches(self.batch_size):
                self._read(block, [spans[number] for number in batch], into=log_probs)
        elif len(log_probs):
            self._read(block, [(0, 0, len(log_probs))], into=log_probs)
        return block.split(log_probs)

    def _read(self, block: LineBlock, spans: list[Span], *, into: NDArray[np.float64]) -> None:
        """Write the log-probabilities of the spans' tokens to their places."""
        chunks = []
        reading = read_spans(
            self.model, block.tokens, spans, eos_id=self.eos_id, state=self._state, inputs=block.inputs
        )
        for predictions, targets_TB, state in reading:
            chunks.append(predictions.nll(targets_TB).double().cpu())
            self._state = state if self.carried else None
        log_probs_BT = (0 - torch.cat(chunks)).t().numpy()  # a unary minus would turn 0 into -0
        for log_probs_T, (_, start, end) in zip(log_probs_BT, spans, strict=True):
            into[start:end] = log_probs_T[: end - start]


def _as_tsv(words: list[str], log_probs: NDArray[np.float64]) -> str:
    each = " ".join(f"{value:.6f}" for value in log_probs.tolist())
    # The words come last, because a word can contain a tab.
    return f"{log_probs.sum():.6f}\t{len(words)}\t{words.count(UNK)}\t{each}\t{printable(' '.join(words))}"


def _as_json(words: list[str], log_probs: NDArray[np.float64]) -> str:
    return json_line(
        {
            "log_prob": round(float(log_probs.sum()), 6),
            "tokens": len(words),
            "unknown": words.count(UNK),
            "word_log_probs": log_probs.round(6).tolist(),
            "words": words,
        }
    )


@dataclass
class Totals:
    """Sums over all lines."""

    lines: int = 0
    tokens: int = 0
    unknown: int = 0
    log_prob: float = 0.0

    def add(self, words: list[str], log_probs: NDArray[np.float64]) -> None:
        self.lines += 1
        self.tokens += len(words)
        self.unknown += words.count(UNK)
        self.log_prob += float(log_probs.sum())

    def __str__(self) -> str:
        return (
            f"{counted(self.lines, 'line')}, {counted(self.tokens, 'token')}, {self.unknown:,} of them unknown words; "
            f"natural log-probability {self.log_prob:.6f}, perplexity {perplexity(-self.log_prob, self.tokens):.4f}"
        )


# ---- mode=topk -------------------------------------------------------------------------------------------------------


def print_next_words(config: EvaluateConfig, model: Predictor, vocabulary: Vocabulary, *, data: DataConfig) -> None:
    """The k likeliest words after the prompt, or after each line of the input, with their probabilities."""
    model.check_k(config.k)
    if config.prompt is None:
        assert config.input is not None
        lines = read_words(config.input, data=data)
        blocks = make_blocks(lines, source=config.input, vocabulary=vocabulary, reader=model)
    else:
        prompt = read_prompt(config.prompt, rule=rule_of(data), vocabulary=vocabulary)
        blocks = iter([make_block([vocabulary.encode([*prompt, EOS])])])
    numbers, batch_size = count(1), config.evaluate.batch_size

    def answer(block: LineBlock) -> Iterator[str]:
        for log_probs, ids in next_words(model, block, k=config.k, eos_id=vocabulary.eos_id, batch_size=batch_size):
            number, words, probs = next(numbers), vocabulary.decode(ids), [math.exp(value) for value in log_probs]
            if config.format is LineFormat.jsonl:
                yield json_line({"line": number, "words": words, "probabilities": [round(p, 8) for p in probs]})
            else:
                rows = zip(words, probs, strict=True)
                yield "\n".join(f"{number}\t{p:.6f}\t{printable(word)}" for word, p in rows)

    write_lines((line for block in with_progress(blocks, out=config.out) for line in answer(block)), config.out)


@torch.no_grad()
def next_words(
    model: Predictor, block: LineBlock, *, k: int, eos_id: int, batch_size: int
) -> list[tuple[list[float], list[int]]]:
    """Log-probabilities and ids of the k likeliest words after each line, each line read from the zero state."""
    spans = block.spans()
    answers: list[tuple[list[float], list[int]]] = [([], [])] * len(spans)
    for batch in block.batches(batch_size):
        # The prediction of each line's `</s>` is the one after its last word.
        last_B = torch.tensor([spans[number][2] - spans[number][1] - 1 for number in batch])
        first = 0
        chosen = [spans[number] for number in batch]
        reading = read_spans(model, block.tokens, chosen, eos_id=eos_id, inputs=block.inputs)
        for predictions, targets_TB, _ in reading:
            inside = ((last_B >= first) & (last_B < first + len(targets_TB))).nonzero().squeeze(1)
            if len(inside):
                scores, ids = predictions.at(last_B[inside] - first, inside).topk(k)
                for place, *found in zip(inside.tolist(), scores.tolist(), ids.tolist(), strict=True):
                    answers[batch[place]] = found[0], found[1]
            first += len(targets_TB)
    return answers
