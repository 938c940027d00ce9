"""Word error rate, and weights of n-best rescoring that minimize it on a development list.

A hypothesis' total is the dot product of its features and their weights. Along a line the errors of the best
hypotheses are piecewise constant, so a line search is exact (Och, 2003). Tuning starts from the best point of a grid
and searches along each weight and a few oblique directions until the errors stop falling. The result is deterministic.

Shapes: H hypotheses of an utterance, K features, D directions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lm.system.console import counted
from lm.system.errors import UserError
from lm.system.jit import compiled

GRID = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Weights of the language model to start from."""
MAX_ROUNDS, NUM_OBLIQUE = 20, 32
BOUND = 100.0
"""Longest step of a line search."""
ERROR = 1 << 20
"""Cost of an insertion or deletion. A substitution costs one less, which breaks ties."""


@dataclass(frozen=True)
class WordErrors:
    """Word errors of texts against their references."""

    substitutions: int
    insertions: int
    deletions: int
    words: int
    """Number of words in the references."""

    @property
    def total(self) -> int:
        return self.substitutions + self.insertions + self.deletions

    def __str__(self) -> str:
        kinds = {"insertion": self.insertions, "deletion": self.deletions, "substitution": self.substitutions}
        listed = ", ".join(counted(number, kind) for kind, number in kinds.items())
        rate = self.total / max(1, self.words)
        return f"WER {rate:.2%}: {counted(self.total, 'error')} in {counted(self.words, 'word')} ({listed})"


@dataclass(frozen=True)
class Utterance:
    """The hypotheses of an utterance with their features and errors."""

    features_HK: NDArray[np.float64]
    errors_H3: NDArray[np.int64]
    """Substitutions, insertions and deletions."""
    num_words: int
    """Length of the reference."""

    def best(self, weights_K: NDArray[np.float64]) -> int:
        """Return the hypothesis with the largest total; the first one wins ties."""
        return int(np.argmax(self.features_HK @ weights_K))


def word_errors(utterances: Sequence[Utterance], weights_K: NDArray[np.float64]) -> WordErrors:
    """Sum the errors of each utterance's best hypothesis."""
    errors = [u.errors_H3[u.best(weights_K)] for u in utterances]
    substitutions, insertions, deletions = np.sum(errors, 0).tolist()
    return WordErrors(substitutions, insertions, deletions, sum(u.num_words for u in utterances))


def tune(utterances: Sequence[Utterance], start_K: Sequence[float]) -> NDArray[np.float64]:
    """Return weights with the fewest word errors. Only their ratios matter."""
    starts = [np.array(start_K, np.float64), *(np.array([value, *start_K[1:]], np.float64) for value in GRID)]
    best_K = min(starts, key=lambda weights_K: word_errors(utterances, weights_K).total)
    fewest = word_errors(utterances, best_K).total
    spread_K = np.concatenate([u.features_HK for u in utterances]).std(0)
    spread_K[spread_K == 0] = np.inf  # no weight of a constant score is better than another
    oblique_DK = np.random.default_rng(0).normal(size=(NUM_OBLIQUE, len(best_K))) / spread_K
    for _ in range(MAX_ROUNDS):
        before = fewest
        for direction_K in [*np.eye(len(best_K)), *oblique_DK]:
            weights_K = best_K + line_search(utterances, best_K, direction_K) * direction_K
            if (errors := word_errors(utterances, weights_K).total) < fewest:
                best_K, fewest = weights_K, errors
        if fewest == before:
            break
    return best_K


def line_search(
    utterances: Sequence[Utterance], weights_K: NDArray[np.float64], direction_K: NDArray[np.float64]
) -> float:
    """Return the step with the fewest errors: the middle of the interval nearest to the current weights."""
    changes = [(-BOUND, 0)]
    errors = 0
    for utterance in utterances:
        slopes_H, heights_H = utterance.features_HK @ direction_K, utterance.features_HK @ weights_K
        totals_H = utterance.errors_H3.sum(1)
        x, current = -BOUND, int(np.argmax(heights_H - BOUND * slopes_H))
        errors += int(totals_H[current])
        while True:  # move right along the upper envelope of the lines
            steeper = np.flatnonzero(slopes_H > slopes_H[current])
            crossings = (heights_H[current] - heights_H[steeper]) / (slopes_H[steeper] - slopes_H[current])
            if not len(steeper) or crossings.min() >= BOUND:
                break
            first = np.flatnonzero(crossings == crossings.min())
            following = int(steeper[first[np.argmax(slopes_H[steeper[first]])]])
            x = max(x, float(crossings.min()))
            changes.append((x, int(totals_H[following] - totals_H[current])))
            current = following
    changes.sort()
    edges, level, choices = [x for x, _ in changes] + [BOUND], errors, []
    for (left, change), right in zip(changes, edges[1:], strict=True):
        level += change
        if right > left:
            middle = (left + right) / 2
            choices.append((level, abs(middle), middle))
    return min(choices)[2]


def count_errors(references: Sequence[Sequence[str]], hypotheses: Sequence[Sequence[str]]) -> NDArray[np.int64]:
    """Return substitutions, insertions and deletions of each hypothesis in a best alignment with its reference."""
    ids: dict[str, int] = {}

    def encode(words: Sequence[str]) -> NDArray[np.int64]:
        return np.array([ids.setdefault(word, len(ids)) for word in words], np.int64)

    pairs = zip(references, hypotheses, strict=True)
    return np.array([_align(encode(reference), encode(hypothesis)) for reference, hypothesis in pairs]).reshape(-1, 3)


@compiled
def _align(reference: NDArray[np.int64], hypothesis: NDArray[np.int64]) -> tuple[int, int, int]:
    """Count errors by dynamic programming over prefixes: as few as possible, with as many substitutions as possible."""
    row = np.arange(len(hypothesis) + 1) * ERROR
    for i in range(len(reference)):
        diagonal, row[0] = row[0], row[0] + ERROR
        for j in range(len(hypothesis)):
            replaced = diagonal + (ERROR - 1 if reference[i] != hypothesis[j] else 0)
            diagonal = row[j + 1]
            row[j + 1] = min(replaced, row[j] + ERROR, row[j + 1] + ERROR)
    errors = (row[-1] + ERROR - 1) // ERROR
    substitutions = errors * ERROR - row[-1]
    more = len(hypothesis) - len(reference)
    insertions = (errors - substitutions + more) // 2
    return substitutions, insertions, insertions - more


def read_references(lines: Iterable[str], *, source: str) -> dict[str, list[str]]:
    """Read lines of `id words`, ignoring blank ones; raises UserError for an id that occurs twice."""
    references: dict[str, list[str]] = {}
    for number, line in enumerate(lines, 1):
        name, *words = line.split() or [""]
        if name in references:
            raise UserError(f"references={source} must have one line per utterance; line {number} repeats {name!r}.")
        if name:
            references[name] = words
    return references
