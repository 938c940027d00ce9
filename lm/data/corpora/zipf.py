"""A seeded source whose true perplexity is known, so that a run can show its distance from the optimum.

Every word belongs to one of K = 8 classes. The next word's class depends on the current word's class, and the
next word only on its own class, in which frequencies fall as 1/rank:

    p(next | word) = P[class(word), class(next)] q(next | class(next))

P is a mixture of permutations: its rows are peaked and its columns also sum to one, so all classes are equally
frequent. The entropy rate is that of the class chain plus the mean entropy of the q; the unigram entropy has ln K
in place of the former. The mixture's weights have 1.49 bits and ln K has 3, so the true perplexity is at most
2^-1.51 = 0.35 of the unigram perplexity, whatever the seed and the vocabulary's size.
"""

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated

import numpy as np
import numpy.typing as npt

from lm.config.registry import plugin
from lm.config.rules import Range
from lm.data.corpus import SPLITS
from lm.data.settings import CorpusConfig
from lm.data.text.vocabulary import Vocabulary
from lm.data.write import Block, Content, Recipe
from lm.system.console import Progress, byte_size
from lm.system.errors import UserError

NUM_CLASSES = 8
WEIGHTS = (0.6, 0.25, 0.1, 0.05)
"""Probability of each permutation; the last one keeps the class, so the chain is aperiodic."""

_BLOCK = 1 << 20

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ZipfSource:
    """The source; words are numbered by decreasing true probability."""

    moves: tuple[tuple[int, ...], ...]
    """The permutations: `moves[i][c]` follows class c."""
    class_of: npt.NDArray[np.int64]
    """The class of each word."""
    within: Floats
    """q(word | its class)."""

    @classmethod
    def build(cls, *, vocab_size: int, seed: int) -> "ZipfSource":
        generator = np.random.default_rng(seed)
        # The first move runs through all classes in one cycle, so every class reaches every other.
        cycle = generator.permutation(NUM_CLASSES)
        first = np.empty_like(cycle)
        first[cycle] = np.roll(cycle, -1)
        others = [generator.permutation(NUM_CLASSES) for _ in WEIGHTS[2:]]
        moves = [first, *others, np.arange(NUM_CLASSES)]
        # Each row of K words holds one word of every class, in shuffled order, and is one rank.
        rows = np.tile(np.arange(NUM_CLASSES), (-(-vocab_size // NUM_CLASSES), 1))
        class_of = generator.permuted(rows, axis=1).ravel()[:vocab_size]
        weight = 1.0 / (1 + np.arange(vocab_size) // NUM_CLASSES)
        within = weight / np.bincount(class_of, weight)[class_of]
        by_rank = np.argsort(-within, kind="stable")
        return cls(tuple(tuple(move.tolist()) for move in moves), class_of[by_rank], within[by_rank])

    @property
    def transitions(self) -> Floats:
        """P, (K, K)."""
        matrix = np.zeros((NUM_CLASSES, NUM_CLASSES))
        for weight, move in zip(WEIGHTS, self.moves, strict=True):
            matrix[np.arange(NUM_CLASSES), move] += weight
        return matrix

    @property
    def true_perplexity(self) -> float:
        """exp of the entropy rate: the lowest perplexity any model can reach."""
        return math.exp(_entropy(self.transitions) / NUM_CLASSES + self._word_entropy)

    @property
    def unigram_perplexity(self) -> float:
        """exp of the entropy of a single word: the perplexity of a unigram model."""
        return math.exp(math.log(NUM_CLASSES) + self._word_entropy)

    @property
    def _word_entropy(self) -> float:
        return _entropy(self.within) / NUM_CLASSES

    def draw(self, num_tokens: int, *, generator: np.random.Generator) -> Iterator[npt.NDArray[np.int64]]:
        """A text that starts in the stationary distribution, as blocks of word numbers."""
        # One search finds a word of any class: class c's distribution function runs from c to c + 1.
        order = np.argsort(self.class_of, kind="stable")
        ends = np.cumsum(np.bincount(self.class_of))
        cumulative = np.cumsum(self.within[order])
        state = int(generator.integers(NUM_CLASSES))
        for start in range(0, num_tokens, _BLOCK):
            size = min(_BLOCK, num_tokens - start)
            choices = np.searchsorted(np.cumsum(WEIGHTS)[:-1], generator.random(size), side="right").tolist()
            chain = accumulate(choices, lambda now, choice: self.moves[choice][now], initial=state)
            classes = np.fromiter(chain, np.int64, count=size + 1)[1:]
            state = int(classes[-1])
            position = np.searchsorted(cumulative, classes + generator.random(size), side="right")
            # Rounding may carry a draw over its class's end.
            yield order[np.clip(position, (ends - np.bincount(self.class_of))[classes], ends[classes] - 1)]


def _entropy(probabilities: Floats) -> float:
    """-sum p ln p, in nats."""
    positive = probabilities[probabilities > 0]
    return -float(positive @ np.log(positive))


BYTES_PER_TOKEN = 2.4
"""On disk: two bytes for a small vocabulary, and validation and test beside the training text."""


@dataclass
class ZipfConfig(CorpusConfig):
    """A seeded Markov source over a Zipfian vocabulary whose true perplexity is known."""

    name: str = "zipf"
    vocab_size: Annotated[int, Range(least=16)] = 10_000
    """Words of the source, without the two marks."""
    tokens: Annotated[int, Range(least=1000)] = 1_000_000
    """Training tokens; validation and test get a tenth each."""
    seed: Annotated[int, Range(least=0)] = 1
    """Seed of the source and of its text; not the seed of training."""


@plugin("data", "zipf", ZipfConfig)
def recipe(config: ZipfConfig) -> Recipe:
    source = ZipfSource.build(vocab_size=config.vocab_size, seed=config.seed)
    assert source.true_perplexity <= source.unigram_perplexity / 2
    return Recipe(
        folder=f"zipf-{config.vocab_size}-words-{config.tokens}-tokens-seed-{config.seed}",
        meta={
            "name": config.name,
            "source": f"a Markov source over {config.vocab_size} words",
            "rule": {"vocab_size": config.vocab_size, "tokens": config.tokens, "seed": config.seed},
            "true_perplexity": source.true_perplexity,
            "unigram_perplexity": source.unigram_perplexity,
        },
        read=lambda _: _read(source, config=config),
    )


def _read(source: ZipfSource, *, config: ZipfConfig) -> Content:
    """Draw the training text once to count it; each split is drawn again, identically, when it is written."""
    needed, free = round(BYTES_PER_TOKEN * config.tokens), shutil.disk_usage(config.root).free
    if needed > free:
        raise UserError(
            f"data.tokens={config.tokens} needs {byte_size(needed)} of disk, but {byte_size(free)} are free under "
            f"data.root={config.root}. Try data.tokens={config.tokens * free // needed // 2}"
        )

    def draw(split: str) -> Iterator[npt.NDArray[np.int64]]:
        index = SPLITS.index(split)
        num_tokens = config.tokens if split == "train" else config.tokens // 10
        return source.draw(num_tokens, generator=np.random.default_rng([config.seed, 1 + index]))

    counts = np.zeros(config.vocab_size, np.int64)
    with Progress(config.tokens, label="train: counting", unit="tokens") as bar:
        for block in draw("train"):
            counts += np.bincount(block, minlength=config.vocab_size)
            bar.advance(len(block))
    # Names sort like the numbers. Every word is in the vocabulary, even if the sample lacks it.
    digits = max(6, len(str(config.vocab_size - 1)))
    names = [f"w{number:0{digits}d}" for number in range(config.vocab_size)]
    vocabulary = Vocabulary.from_counts(zip(names, counts.tolist(), strict=True), min_count=0)
    to_id = vocabulary.encode(names)

    def blocks(split: str) -> Iterator[Block]:
        for numbers in draw(split):
            size = len(numbers) * (digits + 2)  # as text: a letter, the digits and a space per word
            yield Block(to_id[numbers], words=len(numbers), characters=size, size=size)

    return Content(vocabulary, {split: blocks(split) for split in SPLITS})
