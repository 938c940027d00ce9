"""Read the ARPA format, as KenLM, SRILM and `arpa_writer` write it. Every line is checked."""

import gzip
import re
from array import array
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from lm.data.text.vocabulary import EOS, Vocabulary
from lm.ngram.arpa_writer import BOS, LOG_10
from lm.ngram.counting import MOST_ORDER
from lm.ngram.model import Floats, NgramModel
from lm.ngram.trie import Trie, find_child
from lm.system.console import Progress
from lm.system.errors import UserError
from lm.system.jit import compiled

OFTEN = 1 << 14
"""Lines between signs of progress."""
ALMOST_ONE = 1e-4
"""Some programs round the logarithm of 1 to a little above 0."""
LEAST, MOST = -1000, 1000
"""Of a logarithm."""


def read_arpa(path: Path, vocabulary: Vocabulary) -> NgramModel:
    """A model of these words; a UserError names the first line that is wrong."""
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
        opens: Any = partial(gzip.open, path) if is_packed else path.open
        with opens("rb") as file:
            return assemble(ArpaFile(file, path, vocabulary).read(), vocabulary)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"arpa={path} cannot be read: {reason}. Name a file in the ARPA format, plain or .gz") from None


class Level(NamedTuple):
    """The n-grams of an order, sorted as in a trie: by the last word, then by the one before it, and so on."""

    rows: NDArray[np.int32]
    """Word ids, first word first."""
    log_probs: Floats
    """nan where it must be backed off to."""
    log_back_offs: Floats

    def taken(self, numbers: NDArray[Any]) -> "Level":
        """The n-grams of these numbers, or where these are true."""
        return Level(self.rows[numbers], self.log_probs[numbers], self.log_back_offs[numbers])

    def repeated(self) -> NDArray[np.bool_]:
        """Whether an n-gram is the same as the one before it."""
        return np.append(False, (self.rows[1:] == self.rows[:-1]).all(1))[: len(self.rows)]

    def with_rows(self, rows: NDArray[np.int32]) -> "Level":
        """With more n-grams, unless it has them; the first of equal ones stays, because sorting is stable."""
        both = Level(
            np.concatenate([self.rows, rows]),
            np.append(self.log_probs, np.full(len(rows), np.nan)),
            np.append(self.log_back_offs, np.zeros(len(rows))),
        )
        both = both.taken(np.lexsort(both.rows.T))
        return both.taken(~both.repeated())


class ArpaFile:
    """A file that is being read, line by line."""

    def __init__(self, file: IO[bytes], path: Path, vocabulary: Vocabulary) -> None:
        self.file, self.path, self.vocabulary = file, path, vocabulary
        self.number = 0
        self.ids = {word.encode(): number for word, number in vocabulary.ids.items()}
        self.bos, self.eos = BOS.encode(), EOS.encode()
        self.ids[self.bos] = vocabulary.eos_id

    def read(self) -> list[Level]:
        self._expect(b"\\data\\", skip=True)
        sizes: list[int] = []
        while line := self._line():
            found = re.fullmatch(rb"ngram\s+(\d+)\s*=\s*(\d+)", line)
            if found is None or int(found[1]) != len(sizes) + 1:
                self._refuse(f"'ngram {len(sizes) + 1}=NUMBER' or an empty line must stand here", line)
            sizes.append(int(found[2]))
        if not 1 <= len(sizes) <= MOST_ORDER:
            self._refuse(f"there must be from 1 to {MOST_ORDER} orders", b"%d" % len(sizes))
        levels = []
        with Progress(sum(sizes), label="read", unit="n-grams") as progress:
            for order, size in enumerate(sizes, 1):
                self._expect(b"\\%d-grams:" % order)
                levels.append(self._section(order, size, highest=order == len(sizes), progress=progress))
        self._expect(b"\\end\\")
        return levels

    def _section(self, order: int, size: int, *, highest: bool, progress: Progress) -> Level:
        ids, logs, back_offs, numbers = array("i"), array("d"), array("d"), array("q")
        start = 0.0
        for count in range(1, size + 1):
            line = self._line()
            words, log, back_off = self._ngram(line, order, highest=highest)
            if words == [self.bos]:
                start = back_off  # of the start of a sentence, which is `</s>` here
                continue
            try:
                ids.extend([self.ids[word] for word in words])
            except KeyError as error:
                rule = f"every word must be one of the {len(self.vocabulary):,} of the data's vocabulary"
                self._refuse(rule, error.args[0])
            logs.append(log)
            back_offs.append(back_off)
            numbers.append(self.number)
            if count % OFTEN == 0:
                progress.advance(OFTEN)
        rows = np.array(ids, np.int32).reshape(-1, order)
        sorting = np.lexsort(rows.T)
        level = Level(rows, np.array(logs) * LOG_10, np.array(back_offs) * LOG_10).taken(sorting)
        if (again := level.repeated()).any():
            self.number = int(np.array(numbers)[sorting][again].min())
            self._refuse("an n-gram must be listed only once", b"one that was listed before")
        if order == 1:
            self._check_words(level.rows[:, 0])
            level.log_back_offs[self.vocabulary.eos_id] = start * LOG_10
        return level

    def _ngram(self, line: bytes, order: int, *, highest: bool) -> tuple[list[bytes], float, float]:
        parts = line.split()
        if len(parts) != order + 1 and (highest or len(parts) != order + 2):
            wanted = "nothing more" if highest else "perhaps a back-off"
            self._refuse(f"a logarithm, {order} word{'s' * (order > 1)} and {wanted} must stand here", line)
        try:
            log, back_off = float(parts[0]), float(parts[order + 1]) if len(parts) > order + 1 else 0.0
        except ValueError:
            self._refuse("the logarithms of a probability and a back-off must be numbers", line)
        words = parts[1 : order + 1]
        if not LEAST <= log <= ALMOST_ONE or not LEAST <= back_off <= MOST:  # nan is neither
            self._refuse(f"logarithms must be from {LEAST} to {MOST}, and of probabilities at most 0", line)
        if self.bos in words[1:] or self.eos in words[:-1]:
            self._refuse(f"{BOS} can only begin an n-gram, and {EOS} can only end one", line)
        return words, min(log, 0.0), back_off

    def _check_words(self, found: NDArray[np.int32]) -> None:
        missing = np.setdiff1d(np.arange(len(self.vocabulary)), found)
        if len(missing):
            rule = f"every word of the data's vocabulary needs a unigram, and {len(missing):,} have none"
            self._refuse(rule, self.vocabulary.words[int(missing[0])].encode())

    def _line(self) -> bytes:
        self.number += 1
        return self.file.readline().strip()

    def _expect(self, mark: bytes, *, skip: bool = False) -> None:
        """The next line that is not empty; with `skip`, whatever comes before the mark is passed over."""
        while raw := self.file.readline():
            self.number += 1
            line = raw.strip()
            if line == mark:
                return
            if line and not skip:
                self._refuse(f"{mark.decode()} must stand here", line)
        self._refuse(f"{mark.decode()} is missing", b"the end of the file")

    def _refuse(self, rule: str, got: bytes) -> NoReturn:
        text = got.decode(errors="replace").strip()[:80]
        fix = "Let the program that made the file write it again, for exactly these words"
        raise UserError(f"arpa={self.path}, line {self.number}: {rule}; got {text!r}. {fix}")


def assemble(levels: list[Level], vocabulary: Vocabulary) -> NgramModel:
    """One trie. n-grams that pruning has left without their shorter ones get these back, with backed-off values."""
    for order in range(len(levels), 2, -1):
        rows = levels[order - 1].rows
        levels[order - 2] = levels[order - 2].with_rows(np.concatenate([rows[:, 1:], rows[:, :-1]]))
    edges = [0, *np.cumsum([len(level.rows) for level in levels]).tolist()]
    words_M = np.concatenate([level.rows[:, 0] for level in levels])
    log_probs_M = np.concatenate([level.log_probs for level in levels])
    log_back_offs_L = np.concatenate([level.log_back_offs for level in levels])[: edges[-2]]
    children_L = np.full(edges[-2] + 1, edges[-1], np.int32)
    for order, level in enumerate(levels[1:], 2):
        above, first, end = edges[order - 2 : order + 1]
        parents, contexts = (np.empty(end - first, np.int64) for _ in range(2))
        find_nodes(words_M, children_L, np.ascontiguousarray(level.rows[:, 1:]), parents)
        find_nodes(words_M, children_L, np.ascontiguousarray(level.rows[:, :-1]), contexts)
        numbers = np.bincount(parents - above, minlength=first - above)
        children_L[above:first] = first + np.cumsum(numbers) - numbers
        children_L[first] = end
        missing = np.isnan(level.log_probs)
        log_probs_M[first:end][missing] = (log_back_offs_L[contexts] + log_probs_M[parents])[missing]
    return NgramModel(Trie(words_M, children_L, edges), log_probs_M, log_back_offs_L, eos_id=vocabulary.eos_id)


@compiled
def find_nodes(words_M: Any, children_L: Any, rows: Any, nodes: Any) -> None:
    """The node of each n-gram, which must be there."""
    for row in range(len(rows)):
        node = rows[row, -1]
        for column in range(rows.shape[1] - 2, -1, -1):
            node = find_child(words_M, children_L, node, rows[row, column])
        nodes[row] = node
