"""`evaluate.py mode=score`: the log-probability of each line of a text and of each of its tokens, for rescoring.

Shapes: T steps, B lines side by side.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lm.config.commands import EvaluateConfig, LineFormat, LineState, TrainConfig
from lm.data.text.vocabulary import UNK, Vocabulary
from lm.inference.lines import LineBlock, json_line, progress, read_blocks, write_lines
from lm.inference.scoring import Piece, perplexity, read_pieces
from lm.model.language_model import LanguageModel
from lm.model.state import State
from lm.system.console import printable, say


def score_lines(config: EvaluateConfig, model: LanguageModel, vocabulary: Vocabulary, *, run: TrainConfig) -> None:
    """A line of figures for each line of the input, then the totals on stderr."""
    assert config.input is not None
    carried = config.state is LineState.carried
    scorer = LineScorer(model, eos_id=vocabulary.eos_id, carried=carried, batch_size=config.evaluate.batch_size)
    totals = Totals()

    def results(source: str) -> Iterator[str]:
        with progress(config.out) as advance:
            for block in read_blocks(source, data=run.data, vocabulary=vocabulary, pass_over=carried):
                for ids, log_probs in zip(block.lines(block.tokens), scorer.score(block), strict=True):
                    totals.add(line := LineScore(vocabulary.decode(ids.tolist()), log_probs))
                    yield line.as_tsv() if config.format is LineFormat.tsv else line.as_json()
                advance(len(block.ends))

    write_lines(results(config.input), config.out)
    say(f"{totals}; state {config.state.value}", to=sys.stderr)


class LineScorer:
    """The natural log-probability of each token, `</s>` included, line after line.

    Each line is read from `</s>` and the zero state, many lines side by side; or, carried, the lines are one text, read
    as a split of one stream is.
    """

    def __init__(self, model: LanguageModel, *, eos_id: int, carried: bool, batch_size: int) -> None:
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
            pieces = block.pieces()
            for batch in block.batches(self.batch_size):
                self._read(block, [pieces[number] for number in batch], into=log_probs)
        elif len(log_probs):
            self._read(block, [(0, 0, len(log_probs))], into=log_probs)
        return block.lines(log_probs)

    def _read(self, block: LineBlock, pieces: list[Piece], *, into: NDArray[np.float64]) -> None:
        """Put the log-probabilities of the pieces' tokens in their places."""
        chunks = []
        reading = read_pieces(self.model, block.tokens, pieces, eos_id=self.eos_id, state=self._state)
        for hidden_TBD, targets_TB, state in reading:
            chunks.append(self.model.output.nll(hidden_TBD, targets_TB).double().cpu())
            self._state = state if self.carried else None
        # Not a minus sign: it would make the 0 of a certain word a -0.
        log_probs_BT = (0 - torch.cat(chunks)).t().numpy()
        for log_probs_T, (_, start, end) in zip(log_probs_BT, pieces, strict=True):
            into[start:end] = log_probs_T[: end - start]


@dataclass(frozen=True)
class LineScore:
    """What is written of one line."""

    words: list[str]
    """As the model read them: `<unk>` for unknown ones, `</s>` at the end."""
    log_probs: NDArray[np.float64]

    @property
    def log_prob(self) -> float:
        return float(self.log_probs.sum())

    @property
    def unknown(self) -> int:
        return self.words.count(UNK)

    def as_tsv(self) -> str:
        each = " ".join(f"{value:.6f}" for value in self.log_probs.tolist())
        # The words come last, because one can hold a tab.
        return f"{self.log_prob:.6f}\t{len(self.words)}\t{self.unknown}\t{each}\t{printable(' '.join(self.words))}"

    def as_json(self) -> str:
        return json_line(
            {
                "log_prob": round(self.log_prob, 6),
                "tokens": len(self.words),
                "unknown": self.unknown,
                "word_log_probs": self.log_probs.round(6).tolist(),
                "words": self.words,
            }
        )


@dataclass
class Totals:
    """What all lines come to."""

    lines: int = 0
    tokens: int = 0
    unknown: int = 0
    log_prob: float = 0.0

    def add(self, line: LineScore) -> None:
        self.lines += 1
        self.tokens += len(line.words)
        self.unknown += line.unknown
        self.log_prob += line.log_prob

    def __str__(self) -> str:
        return (
            f"{self.lines:,} lines, {self.tokens:,} tokens, {self.unknown:,} of them unknown words; natural log-"
            f"probability {self.log_prob:.6f}, perplexity {perplexity(-self.log_prob, self.tokens):.4f}"
        )
