"""The ARPA format: n-grams as text, with base-10 logarithms.

In ARPA files, `<s>` starts a sentence: a unigram with a back-off weight that is never predicted. Here, `</s>` is used
instead, with the back-off weight of `<s>`. Files from KenLM, SRILM and others can be read too; every line is checked.
Their vocabulary may differ from the data's.
"""

import contextlib
import gzip
import math
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray

from lm.data.formats import open_compressed
from lm.data.text.vocabulary import EOS, UNK, Vocabulary
from lm.ngram.kneser_ney import context_sums, pruned, renormalized
from lm.ngram.model import NgramModel
from lm.ngram.trie import MAX_ORDER, Trie, find_child, pairs, require_memory
from lm.system.console import Progress, say
from lm.system.errors import UserError
from lm.system.files import write_whole
from lm.system.jit import compiled

BOS = "<s>"
LOG_10 = math.log(10)
NEVER_PREDICTED = -99
"""Conventional log-probability of `<s>`."""
LINES = 1 << 16
"""Number of lines formatted or parsed together."""
READ_BYTES = 48
"""Memory that reading needs per n-gram, at most: 24 for the model, 24 for sorting."""
ROUNDING = 1e-4
"""Tolerance above 0, because some programs round log 1 up slightly."""
SUM_TOLERANCE = 1e-3
"""Accepted distance of sums of probabilities from 1."""
MIN_LOG, MAX_LOG = -1000, 100
"""Valid range of logarithms."""
LISTED_TWICE = "an n-gram must be listed only once"
Absent = dict[int, NDArray[np.int32]]
"""By order, n-grams that a file lacks although longer ones need them; pruning programs write such files."""

# ---- writing ---------------------------------------------------------------------------------------------------------


def write_arpa(model: NgramModel, vocabulary: Vocabulary, path: Path) -> None:
    """Write the file atomically, compressed if its name ends in .gz."""
    if invalid := [word for word in vocabulary.words if word == BOS or word.split() != [word]]:
        raise UserError(
            f"out={path} cannot be written: in the ARPA format words contain no spaces and {BOS} is reserved; the "
            f"vocabulary has {invalid[0]!r}. Omit out=FILE."
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
    absent: Absent = {}
    try:
        while True:
            with open_compressed(path) as file:
                arpa = ArpaFile(file, path, vocabulary)
                model = arpa.read(absent)
                while file.read(1 << 20):
                    pass  # the checksum is at the end of a compressed file
            if model is not None:
                break
            absent = arpa.needed
        missing = arpa.missing
        del arpa  # its words
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"arpa={path} cannot be read: {reason}. Name a file in the ARPA format, plain or compressed."
        ) from None
    warn_of_sums(model, "in the file")
    return mapped(model, vocabulary, missing, renormalize=renormalize)


def warn_of_sums(model: NgramModel, place: str) -> None:
    extremes = [extreme for sums in context_sums(model) if len(sums) for extreme in (sums.min(), sums.max())]
    if max(abs(extreme - 1) for extreme in extremes) > SUM_TOLERANCE:
        say(
            f"Probabilities {place} sum to {min(extremes):.4g} to {max(extremes):.4g}, depending on the context. "
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
            warn_of_sums(result, "over the data's words")
    return result


class ArpaFile:
    """Reads an ARPA file line by line into the arrays of a trie, one order after another."""

    def __init__(self, file: IO[bytes], path: Path, vocabulary: Vocabulary) -> None:
        self.file, self.path, self.vocabulary = file, path, vocabulary
        self.line_number = 0
        self.ids = {word.encode(): i for i, word in enumerate(vocabulary.words)}
        self.bos, self.eos = BOS.encode(), EOS.encode()
        self.ids[self.bos] = vocabulary.eos_id
        self.edges = [0]
        self.missing = np.empty(0, np.int64)
        """Words of the data that the file does not have."""
        self.needed: Absent = {}

    def read(self, absent: Absent) -> NgramModel | None:
        """Build the model, with `absent` n-grams added; None if the file needs more, which are then in `needed`."""
        self._expect(b"\\data\\", skip=True)
        sizes: list[int] = []
        while line := self._line():
            match = re.fullmatch(rb"ngram\s+(\d{1,2})\s*=\s*(\d{1,18})", line)
            if match is None or int(match[1]) != len(sizes) + 1:
                self._fail(f"expected 'ngram {len(sizes) + 1}=NUMBER' or an empty line", line)
            sizes.append(int(match[2]))
        if not 1 <= len(sizes) <= MAX_ORDER:
            self._fail(f"expected 1 to {MAX_ORDER} orders", b"%d" % len(sizes))
        doing = f"Reading arpa={self.path} ({sum(sizes):,} n-grams)"
        require_memory(READ_BYTES * sum(sizes), doing=doing, fix="Try a pruned file.")
        most = len(self.vocabulary) + sum(sizes) + sum(map(len, absent.values()))
        self.words_M, self.children_L = np.empty(most, np.int32), np.empty(most + 1, np.int32)
        self.log_probs_M, self.log_back_offs_L = np.empty(most), np.zeros(most)
        with Progress(sum(sizes), label="read", unit="n-grams") as progress:
            for order, size in enumerate(sizes, 1):
                self._expect(b"\\%d-grams:" % order)
                if order == 1:
                    self._read_words(size, highest=len(sizes) == 1)
                else:
                    self._read_ngrams(order, size, absent.get(order), highest=order == len(sizes), progress=progress)
        self._expect(b"\\end\\")
        *_, lower, size = self.edges
        trie = Trie(self.words_M[:size], self.children_L[: lower + 1], self.edges)
        log_probs_M, log_back_offs_L = self.log_probs_M[:size], self.log_back_offs_L[:lower]
        return None if self.needed else NgramModel(trie, log_probs_M, log_back_offs_L, eos_id=self.vocabulary.eos_id)

    def _read_words(self, size: int, *, highest: bool) -> None:
        vocabulary, start = self.vocabulary, 0.0
        self.log_probs_M[: len(vocabulary) + size] = np.nan
        for _ in range(size):
            (word,), log_prob, log_back_off = self._ngram(1, highest=highest)
            if word == self.bos:
                start = log_back_off  # of the sentence start, which is `</s>` here
                continue
            number = self.ids.setdefault(word, len(self.ids) - 1)  # `<s>` gets no number
            if not math.isnan(self.log_probs_M[number]):
                self._fail(LISTED_TWICE, word)
            self.log_probs_M[number], self.log_back_offs_L[number] = log_prob, log_back_off
        self.log_back_offs_L[vocabulary.eos_id] = start
        self.missing = np.flatnonzero(np.isnan(self.log_probs_M[: len(vocabulary)]))
        for special, number in ((EOS, vocabulary.eos_id), (UNK, vocabulary.unk_id)):
            if number in self.missing:
                rule = f"the file must have {EOS}, and {UNK} if it does not have all words of the data"
                self._fail(f"{rule}; {len(self.missing):,} are missing", special.encode())
        for number in self.missing.tolist():
            del self.ids[vocabulary.words[number].encode()]  # longer n-grams must not have it either
        self.log_probs_M[self.missing] = -np.inf
        num_words = len(self.ids) - 1 + len(self.missing)
        self.edges = [0, num_words]
        self.words_M[:num_words] = np.arange(num_words)
        self.children_L[0] = num_words

    def _read_ngrams(
        self, order: int, size: int, absent: NDArray[np.int32] | None, *, highest: bool, progress: Progress
    ) -> None:
        """Read the n-grams of an order above 1 and sort them by parent, then by first word."""
        first_line, (above, first) = self.line_number + 1, self.edges[-2:]
        keys = np.empty(size, np.int64)
        for start in range(0, size, LINES):
            end = min(start + LINES, size)
            rows, log_probs, log_back_offs = self._block(order, end - start, highest=highest)
            keys[start:end], _ = self._keys(rows)
            self.log_probs_M[first + start : first + end] = log_probs
            self.log_back_offs_L[first + start : first + end] = log_back_offs
            progress.advance(end - start)
        if absent is not None:
            more, contexts = self._keys(absent)
            is_new = ~np.isin(more, keys)
            more, contexts = more[is_new], contexts[is_new]
            log_probs = self.log_back_offs_L[contexts] + self.log_probs_M[more >> 32]
            self.log_probs_M[first + size : first + size + len(more)] = log_probs
            keys = np.append(keys, more)
        nodes = slice(first, first + len(keys))
        self.edges.append(nodes.stop)
        sorting = np.argsort(keys)
        keys.sort()
        if len(twice := np.flatnonzero(keys[1:] == keys[:-1])) and not self.needed:
            self.line_number = first_line + int(np.maximum(sorting[twice], sorting[twice + 1]).min())
            self._fail(LISTED_TWICE, b"a duplicate")
        fill_level(keys, above, first, self.words_M, self.children_L)
        del keys
        for logs in (self.log_probs_M, self.log_back_offs_L):
            logs[nodes] = logs[nodes][sorting]

    def _block(self, order: int, size: int, *, highest: bool) -> tuple[NDArray[np.int32], Any, Any]:
        """Read word ids, log-probabilities and back-offs of this many n-grams."""
        ids, log_probs, log_back_offs = array("i"), array("d"), array("d")
        for _ in range(size):
            words, log_prob, log_back_off = self._ngram(order, highest=highest)
            try:
                ids.extend([self.ids[word] for word in words])
            except KeyError as error:
                self._fail("every word needs a unigram", error.args[0])
            log_probs.append(log_prob)
            log_back_offs.append(log_back_off)
        return np.frombuffer(ids, np.int32).reshape(-1, order), log_probs, log_back_offs

    def _keys(self, rows: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return parent and first word of each n-gram as one number, and its context."""
        parents, contexts = np.empty((2, len(rows)), np.int32)
        find_nodes(self.words_M, self.children_L, rows[:, 1:], parents)
        find_nodes(self.words_M, self.children_L, rows[:, :-1], contexts)
        if len(short := rows[(parents < 0) | (contexts < 0)]):
            for length in range(2, rows.shape[1]):
                windows = np.lib.stride_tricks.sliding_window_view(short, length, axis=1).reshape(-1, length)
                self.needed[length] = np.unique(np.concatenate([self.needed.get(length, windows), windows]), axis=0)
        return pairs(parents, rows[:, 0]), contexts

    def _ngram(self, order: int, *, highest: bool) -> tuple[list[bytes], float, float]:
        """Read words, log-probability and back-off of the n-gram on the next line."""
        line = self._line()
        parts = line.split()
        words, numbers = parts[1 : order + 1], parts[:1] + parts[order + 1 :]
        if len(words) < order or len(numbers) > (1 if highest else 2):
            wanted = "nothing else" if highest else "an optional back-off"
            self._fail(f"expected a logarithm, {order} word{'s' * (order > 1)} and {wanted}", line)
        try:
            log_prob, log_back_off = float(numbers[0]), float(numbers[1]) if len(numbers) > 1 else 0.0
        except ValueError:
            log_prob = log_back_off = math.nan
        if b"_" in b"".join(numbers) or math.isnan(log_prob + log_back_off):  # Python reads 1_0 as 10
            self._fail("logarithms must be numbers", line)
        if not MIN_LOG <= log_prob <= ROUNDING or not MIN_LOG <= log_back_off <= MAX_LOG:
            self._fail(f"logarithms must be between {MIN_LOG} and {MAX_LOG}, and at most 0 for probabilities", line)
        if self.bos in words[1:] or self.eos in words[:-1]:
            self._fail(f"{BOS} can only begin an n-gram, and {EOS} can only end one", line)
        return words, min(log_prob, 0.0) * LOG_10, log_back_off * LOG_10

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
        raise UserError(f"arpa={self.path}, line {self.line_number}: {rule}; got {text!r}. Regenerate the file.")


@compiled
def fill_level(keys: Any, above: int, first: int, words_M: Any, children_L: Any) -> None:
    """Fill the first-word column of one order and the child ranges of its parents, [above, first)."""
    parent = above
    for number in range(len(keys)):
        while parent <= keys[number] >> 32:
            children_L[parent] = first + number
            parent += 1
        words_M[first + number] = keys[number] & 0xFFFFFFFF
    children_L[parent : first + 1] = first + len(keys)


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
