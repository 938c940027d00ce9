"""The ARPA format: n-grams as text, with base-10 logarithms.

In ARPA files, `<s>` starts a sentence: a unigram with a back-off weight that is never predicted. Here, `</s>` is used
instead, with the back-off weight of `<s>`. Files from KenLM, SRILM and others can be read too; every line is checked.
Their vocabulary may differ from the data's.
"""

import contextlib
import gzip
import math
import re
import zlib
from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from lm.data.text.vocabulary import EOS, UNK, Vocabulary
from lm.ngram.counting import MAX_ORDER, require_memory
from lm.ngram.kneser_ney import pruned
from lm.ngram.model import NO_WORD, Floats, NgramModel
from lm.ngram.pruning import renormalized
from lm.ngram.trie import Trie, find_child
from lm.system.console import Progress, say
from lm.system.errors import UserError
from lm.system.files import write_whole
from lm.system.jit import compiled

BOS = "<s>"
LOG_10 = math.log(10)
NEVER_PREDICTED = -99
"""Conventional log-probability of `<s>`."""
LINES = 1 << 16
"""Number of lines formatted together."""
READ_BYTES = 60
"""Memory that reading needs per n-gram, in addition to its words."""
PROGRESS_LINES = 1 << 14
"""Number of lines between updates of the progress bar."""
ROUNDING = 1e-4
"""Tolerance above 0, because some programs round log 1 up slightly."""
SAMPLE, SUM_TOLERANCE = 20, 1e-3
"""Number of contexts at which probabilities are summed, and the accepted distance of the sums from 1."""
MIN_LOG, MAX_LOG = -1000, 1000
"""Valid range of logarithms."""

# ---- writing ---------------------------------------------------------------------------------------------------------


def write_arpa(model: NgramModel, vocabulary: Vocabulary, path: Path) -> None:
    """Write the file atomically, compressed if its name ends in .gz."""
    if invalid := [word for word in vocabulary.words if word == BOS or word.split() != [word]]:
        raise UserError(
            f"out={path} cannot be written: in the ARPA format words contain no spaces and {BOS} is reserved; the "
            f"vocabulary has {invalid[0]!r}. Omit out=FILE; the run itself is complete."
        )

    def write(file: BinaryIO) -> None:
        with contextlib.ExitStack() as stack:
            packed: Any = file
            if path.suffix == ".gz":  # no name or timestamp, so the same model gives the same bytes
                packed = stack.enter_context(gzip.GzipFile("", "wb", 6, file, mtime=0))
            for text in _text(model, vocabulary):
                packed.write(text.encode())

    try:
        write_whole(path, write)
    except OSError as error:
        raise UserError(f"out={path} cannot be written: {error.strerror}. Try another out=PATH.") from None


def _text(model: NgramModel, vocabulary: Vocabulary) -> Iterator[str]:
    trie = model.trie
    sizes = [trie.sizes[0] + 1, *trie.sizes[1:]]
    yield "\\data\\\n" + "".join(f"ngram {n}={size}\n" for n, size in enumerate(sizes, 1))
    with Progress(len(trie.words_M), label="write", unit="n-grams") as progress:
        for order in range(1, trie.order + 1):
            yield f"\n\\{order}-grams:\n"
            if order == 1:
                yield (
                    f"{NEVER_PREDICTED}\t{BOS}"
                    + (_back_off(model.log_back_offs_L[model.eos_id]) if trie.order > 1 else "")
                    + "\n"
                )
            for block in _section(model, vocabulary.words, order):
                yield "".join(block)
                progress.advance(len(block))
    yield "\n\\end\\\n"


def _section(model: NgramModel, words: tuple[str, ...], order: int) -> Iterator[list[str]]:
    """Yield blocks of lines for one order's n-grams."""
    trie, nodes = model.trie, model.trie.nodes(order)
    first_words = [BOS if i == model.eos_id and order > 1 else word for i, word in enumerate(words)]
    ngrams = trie.word_ids(order)
    for first in range(0, len(ngrams), LINES):
        ids = ngrams[first : first + LINES]
        block = slice(nodes.start + first, nodes.start + first + len(ids))
        tails = [""] * len(ids)
        if order < trie.order:
            # A sentence end is never a context; the back-off of `</s>` is on the line of `<s>`.
            ends = ids[:, -1] == model.eos_id
            logs = model.log_back_offs_L[block].tolist()
            tails = ["" if end else _back_off(log) for log, end in zip(logs, ends, strict=True)]
        logs = (model.log_probs_M[block] / LOG_10).tolist()
        yield [
            f"{log:.7g}\t{' '.join([first_words[row[0]], *(words[i] for i in row[1:])])}{tail}\n"
            for log, row, tail in zip(logs, ids.tolist(), tails, strict=True)
        ]


def _back_off(log: float) -> str:
    return f"\t{log / LOG_10:.7g}"


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_arpa(path: Path, vocabulary: Vocabulary, *, renormalize: bool = False) -> NgramModel:
    """Read a model and map it to this vocabulary; raises UserError naming the first invalid line."""
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
        opens: Any = partial(gzip.open, path) if is_packed else path.open
        with opens("rb") as file:
            arpa = ArpaFile(file, path, vocabulary)
            model = assemble(arpa.read(), eos_id=vocabulary.eos_id)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"arpa={path} cannot be read: {reason}. Name a file in the ARPA format, plain or .gz."
        ) from None
    warn_of_sums(sums_at(model), "in the file")
    return mapped(model, vocabulary, arpa.missing, renormalize=renormalize)


def sums_at(model: NgramModel) -> Floats:
    """Return the sums of all words' probabilities after a sample of contexts."""
    generator, trie = np.random.default_rng(0), model.trie
    lengths = [n for n in range(1, trie.order) if trie.sizes[n - 1]]
    words_V, sums = np.arange(model.vocab_size), []
    for length in np.resize(lengths, SAMPLE if lengths else 0).tolist():
        recent = np.full(trie.order - 1, NO_WORD)
        node = int(generator.integers(trie.edges[length - 1], trie.edges[length]))
        recent[:length] = trie.ngram(node)[::-1]
        sums.append(np.exp(model.score(np.tile(recent, (len(words_V), 1)), words_V)).sum())
    return np.array(sums)


def warn_of_sums(sums: Floats, place: str) -> None:
    if (abs(sums - 1) > SUM_TOLERANCE).any():
        say(
            f"Probabilities {place} sum to {sums.min():.4f} to {sums.max():.4f} at {len(sums)} contexts. "
            "renormalize=true makes them sum to one."
        )


def mapped(model: NgramModel, vocabulary: Vocabulary, missing: NDArray[np.int64], *, renormalize: bool) -> NgramModel:
    """Drop n-grams with words outside the vocabulary; `missing` words and `<unk>` share the probability of `<unk>`."""
    trie, size, extra = model.trie, len(vocabulary), model.vocab_size - len(vocabulary)
    log_probs_M, log_back_offs_L = model.log_probs_M, model.log_back_offs_L
    if extra:
        kept_M = trie.words_M < size
        for order in range(2, trie.order + 1):
            kept_M[trie.nodes(order)] &= kept_M[trie.parents(order)]
        trie, log_probs_M, log_back_offs_L = pruned(trie, kept_M, log_probs_M, log_back_offs_L)
    if len(missing):
        log_probs_M[trie.last_words() == vocabulary.unk_id] -= math.log(len(missing) + 1)
        log_probs_M[missing] = log_probs_M[vocabulary.unk_id]
    if renormalize:
        result = renormalized(trie, np.exp(log_probs_M), eos_id=vocabulary.eos_id)
    else:
        result = NgramModel(trie, log_probs_M, log_back_offs_L, eos_id=vocabulary.eos_id)
    if extra or len(missing):
        share = vocabulary.counts[missing].sum() / max(1, vocabulary.counts.sum())
        dropped = model.num_ngrams - result.num_ngrams
        say(
            f"The file lacks {len(missing):,} words of the data ({share:.2%} of the training tokens), which share the "
            f"probability of {UNK}. It has {extra:,} other words; their {dropped:,} n-grams are dropped."
        )
        if not renormalize:
            warn_of_sums(sums_at(result), "over the data's words")
    return result


class Level(NamedTuple):
    """N-grams of one order in trie order: sorted by the last word, then the one before it, and so on."""

    rows: NDArray[np.int32]
    """Word ids, in reading order."""
    log_probs: Floats
    """nan for n-grams that only serve for backing off."""
    log_back_offs: Floats

    def select(self, indices: NDArray[Any]) -> "Level":
        """Select n-grams by index or mask."""
        return Level(self.rows[indices], self.log_probs[indices], self.log_back_offs[indices])

    def repeated(self) -> NDArray[np.bool_]:
        """Whether each n-gram equals the previous one."""
        return np.append(False, (self.rows[1:] == self.rows[:-1]).all(1))[: len(self.rows)]

    def with_rows(self, rows: NDArray[np.int32]) -> "Level":
        """Add missing n-grams; sorting is stable, so the first of equal ones is kept."""
        both = Level(
            np.concatenate([self.rows, rows]),
            np.append(self.log_probs, np.full(len(rows), np.nan)),
            np.append(self.log_back_offs, np.zeros(len(rows))),
        )
        both = both.select(np.lexsort(both.rows.T))
        return both.select(~both.repeated())


class ArpaFile:
    """Reads an ARPA file line by line."""

    def __init__(self, file: IO[bytes], path: Path, vocabulary: Vocabulary) -> None:
        self.file, self.path, self.vocabulary = file, path, vocabulary
        self.line_number = 0
        self.ids = {word.encode(): i for word, i in vocabulary.ids.items()}
        self.bos, self.eos = BOS.encode(), EOS.encode()
        self.ids[self.bos] = vocabulary.eos_id
        self.num_words = len(vocabulary)
        """Number of words of the data and the file; the file's other words are numbered after the data's."""
        self.missing = np.empty(0, np.int64)
        """Words of the data that the file does not have."""

    def read(self) -> list[Level]:
        self._expect(b"\\data\\", skip=True)
        sizes: list[int] = []
        while line := self._line():
            match = re.fullmatch(rb"ngram\s+(\d{1,2})\s*=\s*(\d{1,18})", line)
            if match is None or int(match[1]) != len(sizes) + 1:
                self._fail(f"expected 'ngram {len(sizes) + 1}=NUMBER' or an empty line", line)
            sizes.append(int(match[2]))
        if not 1 <= len(sizes) <= MAX_ORDER:
            self._fail(f"expected 1 to {MAX_ORDER} orders", b"%d" % len(sizes))
        needed = sum(size * (READ_BYTES + 4 * order) for order, size in enumerate(sizes, 1))
        require_memory(needed, doing=f"Reading arpa={self.path} ({sum(sizes):,} n-grams)", fix="Try a pruned file.")
        levels = []
        with Progress(sum(sizes), label="read", unit="n-grams") as progress:
            for order, size in enumerate(sizes, 1):
                self._expect(b"\\%d-grams:" % order)
                levels.append(self._section(order, size, highest=order == len(sizes), progress=progress))
        self._expect(b"\\end\\")
        return levels

    def _section(self, order: int, size: int, *, highest: bool, progress: Progress) -> Level:
        ids, logs, back_offs, line_numbers = array("i"), array("d"), array("d"), array("I")
        start = 0.0
        for count in range(1, size + 1):
            line = self._line()
            words, log, back_off = self._ngram(line, order, highest=highest)
            if words == [self.bos]:
                start = back_off  # of the sentence start, which is `</s>` here
                continue
            if order == 1 and words[0] not in self.ids:
                self.ids[words[0]] = self.num_words
                self.num_words += 1
            try:
                ids.extend([self.ids[word] for word in words])
            except KeyError as error:
                self._fail("every word needs a unigram", error.args[0])
            logs.append(log)
            back_offs.append(back_off)
            line_numbers.append(self.line_number)
            if count % PROGRESS_LINES == 0:
                progress.advance(PROGRESS_LINES)
        rows = np.frombuffer(ids, np.int32).reshape(-1, order)
        sorting = np.lexsort(rows.T)
        level = Level(rows, np.frombuffer(logs), np.frombuffer(back_offs)).select(sorting)
        level.log_probs[:] *= LOG_10
        level.log_back_offs[:] *= LOG_10
        if (again := level.repeated()).any():
            self.line_number = int(np.array(line_numbers)[sorting][again].min())
            self._fail("an n-gram must be listed only once", b"a duplicate")
        if order == 1:
            level = self._with_missing_words(level)
            level.log_back_offs[self.vocabulary.eos_id] = start * LOG_10
        return level

    def _with_missing_words(self, unigrams: Level) -> Level:
        self.missing = np.setdiff1d(np.arange(len(self.vocabulary)), unigrams.rows[:, 0])
        for special in (EOS, UNK):
            if len(self.missing) and self.vocabulary.ids[special] in self.missing:
                rule = f"the file must have {EOS}, and {UNK} if it does not have all words of the data"
                self._fail(f"{rule}; {len(self.missing):,} are missing", special.encode())
        for word in self.missing.tolist():
            del self.ids[self.vocabulary.words[word].encode()]  # longer n-grams must not have it either
        level = unigrams.with_rows(self.missing[:, None].astype(np.int32))
        level.log_probs[self.missing] = -np.inf
        return level

    def _ngram(self, line: bytes, order: int, *, highest: bool) -> tuple[list[bytes], float, float]:
        parts = line.split()
        if len(parts) != order + 1 and (highest or len(parts) != order + 2):
            wanted = "nothing else" if highest else "an optional back-off"
            self._fail(f"expected a logarithm, {order} word{'s' * (order > 1)} and {wanted}", line)
        try:
            log, back_off = float(parts[0]), float(parts[order + 1]) if len(parts) > order + 1 else 0.0
        except ValueError:
            self._fail("logarithms must be numbers", line)
        words = parts[1 : order + 1]
        if not MIN_LOG <= log <= ROUNDING or not MIN_LOG <= back_off <= MAX_LOG:  # also rejects nan
            self._fail(f"logarithms must be between {MIN_LOG} and {MAX_LOG}, and at most 0 for probabilities", line)
        if self.bos in words[1:] or self.eos in words[:-1]:
            self._fail(f"{BOS} can only begin an n-gram, and {EOS} can only end one", line)
        return words, min(log, 0.0), back_off

    def _line(self) -> bytes:
        self.line_number += 1
        return self.file.readline().strip()

    def _expect(self, mark: bytes, *, skip: bool = False) -> None:
        """Require `mark` as the next nonempty line; with `skip`, ignore other lines before it."""
        while raw := self.file.readline():
            self.line_number += 1
            line = raw.strip()
            if line == mark:
                return
            if line and not skip:
                self._fail(f"expected {mark.decode()}", line)
        self._fail(f"{mark.decode()} is missing", b"the end of the file")

    def _fail(self, rule: str, got: bytes) -> NoReturn:
        text = got.decode(errors="replace").strip()[:80]
        fix = "Regenerate the file."
        raise UserError(f"arpa={self.path}, line {self.line_number}: {rule}; got {text!r}. {fix}")


def assemble(levels: list[Level], *, eos_id: int) -> NgramModel:
    """Build the model from all levels. Shorter n-grams removed by pruning are added back with backed-off values."""
    if (model := link(levels, eos_id=eos_id)) is None:
        for order in range(len(levels), 2, -1):
            rows = levels[order - 1].rows
            levels[order - 2] = levels[order - 2].with_rows(np.concatenate([rows[:, 1:], rows[:, :-1]]))
        model = link(levels, eos_id=eos_id)
    assert model is not None
    return model


def link(levels: list[Level], *, eos_id: int) -> NgramModel | None:
    """Connect the n-grams of all orders; return None if a shorter one is missing."""
    edges = [0, *np.cumsum([len(level.rows) for level in levels]).tolist()]
    words_M = np.concatenate([level.rows[:, 0] for level in levels])
    log_probs_M = np.concatenate([level.log_probs for level in levels])
    log_back_offs_L = np.concatenate([np.empty(0), *(level.log_back_offs for level in levels[:-1])])
    children_L = np.full(edges[-2] + 1, edges[-1], np.int32)
    for order, level in enumerate(levels[1:], 2):
        above, first, end = edges[order - 2 : order + 1]
        parents, contexts = (np.empty(end - first, np.int32) for _ in range(2))
        find_nodes(words_M, children_L, level.rows[:, 1:], parents)
        find_nodes(words_M, children_L, level.rows[:, :-1], contexts)
        if (parents < 0).any() or (contexts < 0).any():
            return None
        numbers = np.bincount(parents - above, minlength=first - above)
        children_L[above:first] = first + np.cumsum(numbers) - numbers
        children_L[first] = end
        missing = np.flatnonzero(np.isnan(level.log_probs))
        log_probs_M[first + missing] = log_back_offs_L[contexts[missing]] + log_probs_M[parents[missing]]
    return NgramModel(Trie(words_M, children_L, edges), log_probs_M, log_back_offs_L, eos_id=eos_id)


@compiled
def find_nodes(words_M: Any, children_L: Any, rows: Any, nodes: Any) -> None:
    """Find the node of each n-gram, or -1."""
    for row in range(len(rows)):
        node = rows[row, -1]
        for column in range(rows.shape[1] - 2, -1, -1):
            node = find_child(words_M, children_L, node, rows[row, column])
            if node < 0:
                break
        nodes[row] = node
