"""`evaluate.py mode=topk`: the likeliest words after a text, exactly, with their probabilities.

Shapes: T steps, B lines side by side, D width of the hidden state, k words.
"""

import math
from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor

from lm.config.commands import EvaluateConfig, LineFormat, TrainConfig
from lm.data.settings import rule_of
from lm.data.text.vocabulary import EOS, Vocabulary
from lm.inference.lines import LineBlock, json_line, make_block, progress, read_blocks, read_prompt, write_lines
from lm.inference.scoring import Piece, read_pieces
from lm.model.language_model import LanguageModel
from lm.system.console import printable


def tell_next_words(config: EvaluateConfig, model: LanguageModel, vocabulary: Vocabulary, *, run: TrainConfig) -> None:
    """The k likeliest words after the prompt, or after each line of the input."""
    model.output.check_k(config.k)

    def results() -> Iterator[str]:
        numbers = count(1)
        with progress(config.out) as advance:
            for block in _blocks(config, vocabulary, run=run):
                answers = next_words(
                    model, block, k=config.k, eos_id=vocabulary.eos_id, batch_size=config.evaluate.batch_size
                )
                for log_probs, ids in answers:
                    words = vocabulary.decode(ids)
                    yield _written(next(numbers), words, log_probs, as_json=config.format is LineFormat.jsonl)
                advance(len(block.ends))

    write_lines(results(), config.out)


def _blocks(config: EvaluateConfig, vocabulary: Vocabulary, *, run: TrainConfig) -> Iterator[LineBlock]:
    if config.prompt is None:
        assert config.input is not None
        yield from read_blocks(config.input, data=run.data, vocabulary=vocabulary)
    else:
        words = read_prompt(config.prompt, rule=rule_of(run.data), vocabulary=vocabulary)
        yield make_block([vocabulary.encode([*words, EOS])])


@torch.no_grad()
def next_words(
    model: LanguageModel, block: LineBlock, *, k: int, eos_id: int, batch_size: int
) -> list[tuple[list[float], list[int]]]:
    """Log-probabilities and ids of the k likeliest words where each line ends, each read from the zero state."""
    pieces = block.pieces()
    answers: list[tuple[list[float], list[int]]] = [([], [])] * len(pieces)
    for batch in block.batches(batch_size):
        hidden_BD = _last_hidden(model, block, [pieces[number] for number in batch], eos_id=eos_id)
        scores_Bk, ids_Bk = model.output.topk(hidden_BD, k)
        for number, scores, ids in zip(batch, scores_Bk.tolist(), ids_Bk.tolist(), strict=True):
            answers[number] = scores, ids
    return answers


def _last_hidden(model: LanguageModel, block: LineBlock, pieces: list[Piece], *, eos_id: int) -> Tensor:
    """The state that predicts each line's `</s>`: after the last of its words, which is where the next one stands."""
    last_B = torch.tensor([end - start - 1 for _, start, end in pieces])
    found = []
    first = 0
    for hidden_TBD, _, _ in read_pieces(model, block.tokens, pieces, eos_id=eos_id):
        inside = ((last_B >= first) & (last_B < first + len(hidden_TBD))).nonzero().squeeze(1)
        found.append(hidden_TBD[last_B[inside] - first, inside])
        first += len(hidden_TBD)
    # Lines are laid out longest first, so those that end later stand before those that ended before.
    return torch.cat(found[::-1])


def _written(number: int, words: list[str], log_probs: list[float], *, as_json: bool) -> str:
    probabilities = [math.exp(value) for value in log_probs]
    if as_json:
        return json_line({"line": number, "words": words, "probabilities": [round(p, 8) for p in probabilities]})
    return "\n".join(f"{number}\t{p:.6f}\t{printable(word)}" for word, p in zip(words, probabilities, strict=True))
