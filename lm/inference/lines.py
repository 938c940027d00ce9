"""`evaluate.py mode=score` and `mode=topk`: log-probabilities of lines, and the most likely next words.

Lines are read in blocks of about BLOCK_TOKENS tokens, which bounds memory. Within a block, lines are processed in
batches of similar length, longest first, and results are written in input order.

Shapes: T steps, B lines in a batch, k words.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.config.groups import DataConfig
from lm.config.inference import EvaluateConfig
from lm.data.formats import COMPRESSIONS, open_compressed
from lm.data.source import explain_damage, read_lines, rule_of
from lm.data.text.tokenize import TokenRule
from lm.data.text.vocabulary import EOS, UNK, Ids, SubwordVocabulary, Vocabulary
from lm.inference.open_model import LoadedModel
from lm.model.base import State
from lm.model.predictor import Predictions
from lm.model.scoring import Span, measure_spans, perplexity, read_spans
from lm.system.console import Progress, counted, printable, say
from lm.system.errors import UserError
from lm.system.files import json_ready, write_whole

Line = TypeVar("Line")

BLOCK_TOKENS = 1 << 16
SHORT = 16
"""Padding a line by this many tokens is cheap."""
SNIFFED_BYTES = 1 << 13
"""Number of leading bytes to check: a zero byte means that the file is not text."""

# ---- mode=score ------------------------------------------------------------------------------------------------------


def score_lines(config: EvaluateConfig, loaded: LoadedModel) -> None:
    """Write log-probabilities of each line and its tokens; totals go to stderr."""
    assert config.input is not None
    show, totals = _as_tsv if config.format == "tsv" else _as_json, Totals()
    lines = read_words(config.input, data=loaded.data, skip_empty=config.state == "carried")
    write_lines((show(*tokens) for tokens in scored(lines, config, loaded, totals)), config.out)
    say(f"{totals}; state {config.state}", to=sys.stderr)


def scored(
    lines: Iterable[Sequence[str]], config: EvaluateConfig, loaded: LoadedModel, totals: "Totals"
) -> Iterator[tuple[list[str], NDArray[np.float64]]]:
    """Yield each line's tokens and log-probabilities, and add them to the totals."""
    carried = config.state == "carried"
    measured = measure_lines(lines, loaded, source=config.input or "-", carried=carried)
    for words, log_probs in with_progress(measured, out=config.out):
        totals.add(words, log_probs)
        yield words, log_probs


def log_probs_of(predictions: Predictions, targets_TB: Tensor) -> Tensor:
    """Return the natural log-probability of each target."""
    return 0 - predictions.nll(targets_TB)  # unary minus would turn 0 into -0


@torch.no_grad()
def measure_lines(
    lines: Iterable[Sequence[str]],
    loaded: LoadedModel,
    *,
    source: str = "",
    carried: bool = False,
    state: State | None = None,
    measure: Callable[[Predictions, Tensor], Tensor] = log_probs_of,
    learn: Callable[["LineBlock"], None] | None = None,
) -> Iterator[tuple[list[str], NDArray[np.float64]]]:
    """Yield each line's tokens, including `</s>`, and their values, (..., tokens).

    Lines are batched, and each starts from `</s>` and `state`, by default zero. With `carried`, all lines form one
    text, scored like a split with one stream. `measure` maps predictions and targets (T, B) to values (..., T, B).
    Calls `learn` after each non-empty line; each line is then a separate block.
    """
    options: dict[str, Any] = {"eos_id": loaded.vocabulary.eos_id, "measure": measure}
    for block in make_blocks(lines, loaded, source=source, single=learn is not None):
        whole = [[(0, 0, len(block.tokens))]] if len(block.tokens) else []
        batches = whole if carried or learn else list(block.batches(loaded.batch_size))
        values, after = measure_spans(loaded.model, block.tokens, batches, state=state, inputs=block.inputs, **options)
        state = after if carried else state
        for ids, of_line in zip(block.split(block.tokens), block.split(values), strict=True):
            yield loaded.vocabulary.decode(ids.tolist()), of_line
        if learn is not None and whole:
            learn(block)


def _as_tsv(words: list[str], log_probs: NDArray[np.float64]) -> str:
    each = " ".join(f"{value:.6f}" for value in log_probs.tolist())
    # Words come last, because a word can contain a tab.
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
    """Totals over all lines."""

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


def print_next_words(config: EvaluateConfig, loaded: LoadedModel) -> None:
    """Write the k most likely words after the prompt or after each input line, with their probabilities."""
    if config.prompt is None:
        lines = read_words(config.input or "-", data=loaded.data)
    else:
        lines = iter([[*read_prompt(config.prompt, rule=rule_of(loaded.data), vocabulary=loaded.vocabulary), EOS]])
    show = _words_as_tsv if config.format == "tsv" else _words_as_json
    answers = with_progress(next_words(lines, loaded, k=config.k, source=config.input or ""), out=config.out)
    write_lines((show(number, *answer) for number, answer in enumerate(answers, 1)), config.out)


@torch.no_grad()
def next_words(
    lines: Iterable[Sequence[str]], loaded: LoadedModel, *, k: int, source: str = ""
) -> Iterator[tuple[list[str], list[float]]]:
    """Yield the k most likely words after each line and their probabilities, starting from the zero state."""
    loaded.model.check_k(k)
    for block in make_blocks(lines, loaded, source=source):
        answers: dict[Span, tuple[list[str], list[float]]] = {}
        options: dict[str, Any] = {"eos_id": loaded.vocabulary.eos_id, "inputs": block.inputs}
        for spans in block.batches(loaded.batch_size):
            # The prediction of a line's `</s>` is the one after its last word.
            first, last_B = 0, torch.tensor([end - start - 1 for start, _, end in spans])
            for predictions, targets_TB, _ in read_spans(loaded.model, block.tokens, spans, **options):
                inside = ((last_B >= first) & (last_B < first + len(targets_TB))).nonzero().squeeze(1)
                if len(inside):
                    scores, ids = predictions.at(last_B[inside] - first, inside).topk(int(k))
                    for i, *best in zip(inside.tolist(), ids.tolist(), scores.double().exp().tolist(), strict=True):
                        answers[spans[i]] = loaded.vocabulary.decode(best[0]), best[1]
                first += len(targets_TB)
        yield from map(answers.__getitem__, block.spans())


def _words_as_tsv(number: int, words: list[str], probs: list[float]) -> str:
    return "\n".join(f"{number}\t{p:.6f}\t{printable(word)}" for word, p in zip(words, probs, strict=True))


def _words_as_json(number: int, words: list[str], probs: list[float]) -> str:
    return json_line({"line": number, "words": words, "probabilities": [round(p, 8) for p in probs]})


# ---- reading and writing lines ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LineBlock:
    """Word ids of consecutive lines, each ending in `</s>`; skipped lines are empty."""

    tokens: Ids
    ends: list[int]
    """End of each line, after its `</s>`."""
    inputs: Ids
    """Input ids, which differ if the model reads OOV words by their characters."""

    @classmethod
    def of(cls, lines: Sequence[Sequence[str]], loaded: LoadedModel) -> "LineBlock":
        """Encode lines of words."""
        ids = [loaded.vocabulary.encode(words) for words in lines]
        inputs = [input_ids(words, each, loaded) for words, each in zip(lines, ids, strict=True)]
        return cls(np.concatenate(ids), list(accumulate(map(len, ids))), np.concatenate(inputs))

    def spans(self) -> list[Span]:
        """Return one span per line, starting from the zero state. The token before it, its first input, is `</s>`."""
        return [(start, start, end) for start, end in pairwise([0, *self.ends])]

    def batches(self, size: int) -> Iterator[list[Span]]:
        """Group spans into batches, longest first; none is much shorter than half its batch's longest."""
        batch: list[Span] = []
        for span in sorted(self.spans(), key=lambda span: span[0] - span[2]):
            if batch and (len(batch) == size or 2 * (span[2] - span[0]) + SHORT < batch[0][2] - batch[0][0]):
                yield batch
                batch = []
            batch.append(span)
        yield batch

    def split(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """Split per-token values, (..., tokens), by line."""
        return np.split(values, self.ends[:-1], axis=-1)


def read_words(source: str, *, data: DataConfig, skip_empty: bool = False) -> Iterator[list[str]]:
    """Yield each line's words and `</s>`, from a file or from standard input (`-`)."""
    rule = rule_of(data)
    return (rule.sentence(line, skip_empty=skip_empty) for line in open_lines(source))


def make_blocks(
    lines: Iterable[Sequence[str]], loaded: LoadedModel, *, source: str = "", single: bool = False
) -> Iterator[LineBlock]:
    """Encode lines for a model; `single` lines and those typed on a terminal form blocks of one line."""
    enough = 1 if single or (source == "-" and sys.stdin.isatty()) else BLOCK_TOKENS
    pending: list[Sequence[str]] = []
    num_tokens = 0
    for words in lines:
        pending.append(words)
        num_tokens += 1 + len(words)  # skipped lines use memory too
        if num_tokens >= enough:
            yield LineBlock.of(pending, loaded)
            pending, num_tokens = [], 0
    if pending:
        yield LineBlock.of(pending, loaded)


def input_ids(words: Sequence[str], ids: Ids, loaded: LoadedModel) -> Ids:
    """Return input ids: vocabulary ids, or model-specific ids for OOV words that it reads by their characters."""
    unknown = np.flatnonzero(ids == loaded.vocabulary.unk_id)
    if isinstance(loaded.vocabulary, SubwordVocabulary) or not len(unknown):
        return ids
    unseen = [i for i in unknown.tolist() if words[i] != UNK]
    if (unseen_ids := loaded.model.ids_of_unseen([words[i] for i in unseen])) is None:
        return ids
    inputs = ids.copy()
    inputs[unseen] = unseen_ids
    return inputs


def open_lines(source: str, *, key: str = "input") -> Iterator[str]:
    """Yield the lines of a text file, compressed if its ending says so, or of standard input (`-`).

    `key` is the setting that names it.
    """
    name = "standard input" if source == "-" else source
    empty = True
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(explain_damage(name))
            if source == "-":
                file: IO[bytes] = sys.stdin.buffer
                if sys.stdin.isatty():
                    say("Type one sentence per line; Ctrl-D ends.", to=sys.stderr)
            else:
                path = Path(source)
                compressed = path.suffix in COMPRESSIONS
                file = stack.enter_context(open_compressed(path, path.suffix) if compressed else path.open("rb"))
            if b"\0" in file.peek(SNIFFED_BYTES)[:SNIFFED_BYTES]:  # type: ignore[attr-defined]
                raise UserError(f"{key}={source} must be text, one sentence per line; {name} is binary.")
            for line in read_lines(file, name=name):
                empty = False
                yield line
    except OSError as error:
        raise UserError(f"{key}={source} cannot be read: {error.strerror}. Name a text file, or - for stdin.") from None
    if empty:
        raise UserError(f"{key}={source} must have at least one line; it is empty. Put one sentence on each line.")


def read_prompt(prompt: str, *, rule: TokenRule, vocabulary: Vocabulary) -> list[str]:
    """Tokenize a prompt, with `</s>` at line ends; unless empty, it must contain a vocabulary word."""
    *ended, last = prompt.split("\n")
    words = [word for line in ended if (on_line := rule.words(line)) for word in [*on_line, EOS]] + rule.words(last)
    unknown = list(dict.fromkeys(word for word in words if not vocabulary.knows(word)))
    shown = ", ".join(unknown[:10]) + (f" and {len(unknown) - 10} more" if len(unknown) > 10 else "")
    if unknown and not set(words) - {*unknown, EOS}:
        raise UserError(
            f"prompt must contain at least one word in the vocabulary; got {shown}. The vocabulary has the "
            f"{len(vocabulary):,} most frequent words of the training text; try some of those."
        )
    if unknown:
        say(f"Not in the run's vocabulary, read as <unk>: {shown}", to=sys.stderr)
    return words


def with_progress(lines: Iterable[Line], *, out: str | None) -> Iterator[Line]:
    """Iterate over the results of lines, showing progress on stderr unless they are printed to the terminal."""
    if out is None and sys.stdout.isatty():
        yield from lines
        return
    with Progress(None, label="read", unit="lines", to=sys.stderr) as progress:
        for line in lines:
            yield line
            progress.advance()


def write_lines(lines: Iterable[str], out: str | None) -> None:
    """Write lines to a file atomically, or to stdout as they are produced."""
    if out is None:
        for line in lines:
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        return
    try:
        write_whole(Path(out), lambda file: file.writelines(f"{line}\n".encode() for line in lines))
    except OSError as error:
        raise UserError(f"out={out} cannot be written: {error.strerror}. Try another out=PATH.") from None


def json_line(values: dict[str, Any]) -> str:
    """Format one line of JSON. Non-ASCII letters stay readable; control characters are escaped to protect terminals."""
    line = json.dumps(json_ready(values), ensure_ascii=False)
    return line if line.isprintable() else json.dumps(json_ready(values))
