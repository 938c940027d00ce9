"""Write the ARPA format: n-grams as text, with logarithms to base 10.

The start of a sentence is `<s>` there: a unigram with a back-off that is itself never predicted. Here it is `</s>`,
whose back-off is that of the start.
"""

import contextlib
import gzip
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from lm.data.text.vocabulary import Vocabulary
from lm.ngram.model import NgramModel
from lm.system.console import Progress
from lm.system.errors import UserError
from lm.system.files import write_whole

BOS = "<s>"
LOG_10 = math.log(10)
NEVER = -99
"""By convention, the logarithm of a probability that is never asked for."""
LINES = 1 << 16
"""Lines formatted at once."""


def write_arpa(model: NgramModel, vocabulary: Vocabulary, path: Path) -> None:
    """The whole file or none; compressed if its name ends in .gz."""
    strange = [word for word in vocabulary.words if word == BOS or word.split() != [word]]
    if strange:
        raise UserError(
            f"out={path} cannot be written: the ARPA format separates words by spaces and keeps {BOS} for itself, and "
            f"the vocabulary has {strange[0]!r}. Omit out=FILE; the run itself is complete"
        )

    def write(file: BinaryIO) -> None:
        with contextlib.ExitStack() as stack:
            packed: Any = file
            if path.suffix == ".gz":  # without name and time, so that the same model gives the same bytes
                packed = stack.enter_context(gzip.GzipFile("", "wb", 6, file, mtime=0))
            for text in _text(model, vocabulary):
                packed.write(text.encode())

    try:
        write_whole(path, write)
    except OSError as error:
        raise UserError(f"out={path} cannot be written: {error.strerror}. Try another out=PATH") from None


def _text(model: NgramModel, vocabulary: Vocabulary) -> Iterator[str]:
    trie = model.trie
    sizes = [trie.sizes[0] + 1, *trie.sizes[1:]]
    yield "\\data\\\n" + "".join(f"ngram {n}={size}\n" for n, size in enumerate(sizes, 1))
    with Progress(len(trie.words_M), label="write", unit="n-grams") as progress:
        for order in range(1, trie.order + 1):
            yield f"\n\\{order}-grams:\n"
            if order == 1:
                yield (
                    f"{NEVER}\t{BOS}"
                    + (_back_off(model.log_back_offs_L[model.eos_id]) if trie.order > 1 else "")
                    + "\n"
                )
            for block in _section(model, vocabulary.words, order):
                yield "".join(block)
                progress.advance(len(block))
    yield "\n\\end\\\n"


def _section(model: NgramModel, words: tuple[str, ...], order: int) -> Iterator[list[str]]:
    """Lines of the n-grams of an order."""
    trie, nodes = model.trie, model.trie.nodes(order)
    at_start = [BOS if number == model.eos_id and order > 1 else word for number, word in enumerate(words)]
    spelled = trie.spelled(order)
    for first in range(0, len(spelled), LINES):
        ids, block = (
            spelled[first : first + LINES],
            slice(nodes.start + first, min(nodes.stop, nodes.start + first + LINES)),
        )
        tails = [""] * len(ids)
        if order < trie.order:
            # What ends a sentence is never a context; the back-off of the word `</s>` is on the line of `<s>`.
            ends = ids[:, -1] == model.eos_id
            logs = model.log_back_offs_L[block].tolist()
            tails = ["" if end else _back_off(log) for log, end in zip(logs, ends, strict=True)]
        logs = (model.log_probs_M[block] / LOG_10).tolist()
        yield [
            f"{log:.7g}\t{' '.join([at_start[row[0]], *(words[i] for i in row[1:])])}{tail}\n"
            for log, row, tail in zip(logs, ids.tolist(), tails, strict=True)
        ]


def _back_off(log: float) -> str:
    return f"\t{log / LOG_10:.7g}"
