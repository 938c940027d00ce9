"""`evaluate.py mode=surprisal` and `TrainedModel.surprisal`: a table with one row per token.

A sentence starts after `</s>` from a zero state, so its first word is predicted like any sentence's first word in
training. Its last row is `</s>`, the end of the sentence. Surprisals and entropies are in bits.

Shapes: T steps, B sentences in a batch, N positions, V words.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from functools import partial
from itertools import pairwise, tee
from typing import Any

import torch
from torch import Tensor

from lm.config.inference import EvaluateConfig
from lm.data.source import rule_of
from lm.data.text.vocabulary import SubwordVocabulary
from lm.inference.dynamic import Dynamic
from lm.inference.lines import LineBlock, Totals, json_line, measure_lines, open_lines, with_progress, write_lines
from lm.inference.open_model import LoadedModel
from lm.model.predictor import Predictions
from lm.model.scoring import lay_out
from lm.output.base import IGNORE_INDEX
from lm.system.console import printable, say
from lm.system.errors import UserError

BLOCK_VALUES = 1 << 22
"""Probabilities held at a time, which bounds memory."""
SMALLEST = -1e4
"""Stands for log(0) in an entropy, to which it contributes 0."""
HEADER = (
    "# surprisal and entropy in bits; the first token of a sentence is predicted after </s> from a zero state; </s> is "
    "the end of the sentence; start and end are character offsets in the line"
)
CARRIED = HEADER.replace("a zero state", "the state after the sentence before")
ADAPTED = f"{HEADER}; the weights are updated after each sentence"


@dataclass(frozen=True)
class Token:
    """One row of a surprisal table."""

    sentence_id: int
    """Line number, from 1."""
    token_id: int
    """Position in the sentence, from 1."""
    token: str
    surprisal: float
    """-log2 p(token | previous tokens); that of `<unk>` for unknown words."""
    entropy: float
    """Entropy of the distribution before the token."""
    entropy_reduction: float | None
    """Entropy before minus entropy after the token, at least 0; None for the last token."""
    rank: int
    """1 if the token was the most likely one."""
    unknown: int
    """1 for words outside the vocabulary."""
    start: int | None
    end: int | None
    """Position in the line; None for words that tokenization has changed, such as digits in Text8."""


COLUMNS = [field.name for field in fields(Token)]


def write_surprisals(config: EvaluateConfig, loaded: LoadedModel) -> None:
    """Write the table of all lines; totals go to stderr."""
    assert config.input is not None
    totals, carried = Totals(), config.state == "carried"
    sentences = surprisals(open_lines(config.input), loaded, totals, source=config.input, carried=carried)
    tokens = (token for sentence in with_progress(sentences, out=config.out) for token in sentence)
    header = CARRIED if carried else ADAPTED if config.adapt else HEADER
    as_json = (json_line(asdict(token)) for token in tokens)
    write_lines(as_json if config.format == "jsonl" else as_tsv(tokens, header=header), config.out)
    say(str(totals), to=sys.stderr)


def surprisals(
    lines: Iterable[str], loaded: LoadedModel, totals: Totals, *, source: str = "", carried: bool = False
) -> Iterator[list[Token]]:
    """Yield each line's tokens, and add them to the totals; `carried` lines continue the text before them.

    A dynamic model learns from each line before it reads the next one (van Schijndel and Linzen, 2018). If lines depend
    on those before them, blank lines that training ignores are skipped.
    """
    vocabulary, rule, learn = loaded.vocabulary, rule_of(loaded.data), None
    if isinstance(vocabulary, SubwordVocabulary):
        raise UserError("mode=surprisal needs a model of words; this one predicts subwords. Try mode=score.")
    if isinstance(loaded.model, Dynamic):
        loaded.model.initial_state(1)  # restores the trained weights, which tuning has changed
        learn = partial(learn_from, loaded.model, eos_id=vocabulary.eos_id)
        loaded = replace(loaded, model=loaded.model.model)
    skip_empty = carried or learn is not None
    sentences, unread = tee((line, rule.sentence(line, skip_empty=skip_empty)) for line in lines)
    options: dict[str, Any] = {"source": source, "carried": carried, "measure": measure, "learn": learn}
    measured = measure_lines((words for _, words in unread), loaded, **options)
    for (tokens, values), (line, words) in zip(measured, sentences, strict=False):
        if not words:
            totals.lines += 1
            continue
        totals.add(tokens, -math.log(2) * values[0])
        bits, entropy, ranks = values.tolist()
        reductions = [*(max(0.0, before - after) for before, after in pairwise(entropy)), None]
        unknown = [int(not vocabulary.knows(word)) for word in words]
        starts, ends = zip(*offsets(line, words), strict=True)
        columns = zip(words, bits, entropy, reductions, map(int, ranks), unknown, starts, ends, strict=True)
        yield [Token(totals.lines, number, *of_token) for number, of_token in enumerate(columns, 1)]


def learn_from(dynamic: Dynamic, block: LineBlock, *, eos_id: int) -> None:
    """Update the weights of a dynamic model once, by a block of one line."""
    device = dynamic.device
    words_T1, targets_T1 = lay_out(block.tokens, block.spans(), eos_id=eos_id, inputs=block.inputs)
    dynamic.learn(words_T1.to(device), targets_T1.to(device), dynamic.model.initial_state(1))


@torch.no_grad()
def measure(predictions: Predictions, targets_TB: Tensor) -> Tensor:
    """Return surprisal, entropy and rank of each target, (3, T, B); 0 for ignored targets."""
    steps_N, streams_N = (targets_TB != IGNORE_INDEX).nonzero(as_tuple=True)
    found_3TB = torch.zeros(3, *targets_TB.shape, dtype=torch.float64, device=targets_TB.device)
    found_3TB[0] = predictions.nll(targets_TB).double() / math.log(2)  # as in mode=score
    first, rows = 0, 1
    while first < len(steps_N):
        at = steps_N[first : first + rows], streams_N[first : first + rows]
        log_prob_NV = predictions.at(*at).log_prob()
        own_N1 = log_prob_NV.gather(-1, targets_TB[at][:, None])
        entropy_N = 0 - (log_prob_NV.exp() * log_prob_NV.clamp(min=SMALLEST)).sum(-1)  # half the time of torch's entr
        rank_N = 1 + (log_prob_NV > own_N1).sum(-1)
        found_3TB[1:, *at] = torch.stack([entropy_N.double() / math.log(2), rank_N.double()])
        first, rows = first + rows, max(1, BLOCK_VALUES // log_prob_NV.size(-1))
    return found_3TB


def offsets(line: str, words: Sequence[str]) -> list[tuple[int | None, int | None]]:
    """Find each word in its line, from left to right; `</s>` is at the end of the line."""
    found: list[tuple[int | None, int | None]] = []
    lowered = line.lower() if len(line.lower()) == len(line) else line
    first, end_of_line = 0, len(line.rstrip("\r\n"))
    for word in words[:-1]:
        start = line.find(word, first)
        start = lowered.find(word, first) if start < 0 else start
        found.append((start, start + len(word)) if start >= 0 else (None, None))
        first = start + len(word) if start >= 0 else first
    return [*found, (end_of_line, end_of_line)]


def as_tsv(tokens: Iterable[Token], *, header: str = HEADER) -> Iterator[str]:
    """Format a table with a line on its conventions and a line of column names; NA for missing values."""
    for number, token in enumerate(tokens):
        if number == 0:  # after the first line was read, so that bad input writes nothing
            yield header
            yield "\t".join(COLUMNS)
        yield "\t".join(_cell(value) for value in astuple(token))


def _cell(value: Any) -> str:
    if value is None:
        return "NA"
    return f"{value:.6f}" if isinstance(value, float) else printable(str(value)).replace("\t", " ")
