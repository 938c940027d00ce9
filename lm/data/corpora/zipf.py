"""A seeded synthetic source with known true perplexity, so that a run's distance from the optimum is known.

Every word belongs to one of K = 8 classes. The class of the next word depends on the class of the current one, and the
next word only on its class, in which frequencies fall as 1/rank:

    p(next | word) = P[class(word), class(next)] q(next | class(next))

P is a mixture of permutations: its rows are peaked and its columns sum to one, so all classes are equally frequent. The
entropy rate is the entropy of the class chain plus the mean entropy of the q. The unigram entropy has ln K instead
of the former. The mixture weights have 1.49 bits and ln K has 3, so the unigram perplexity is at least 2^1.51 = 2.8
times the true one for every seed and vocabulary size.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt

from lm.config.groups import Range, plugin
from lm.data.source import SPLITS, CorpusConfig, Source, Splits, TextFile
from lm.data.text.vocabulary import VocabularyRule

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
        # Each row of K words has one word of every class, in shuffled order, and is one rank.
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
        """exp of the entropy rate: the lowest perplexity that any model can reach."""
        return math.exp(_entropy(self.transitions) / NUM_CLASSES + _entropy(self.within) / NUM_CLASSES)

    @property
    def unigram_perplexity(self) -> float:
        """exp of the entropy of a single word: the perplexity of a unigram model."""
        return math.exp(math.log(NUM_CLASSES) + _entropy(self.within) / NUM_CLASSES)

    def draw(self, num_tokens: int, generator: np.random.Generator) -> Iterator[npt.NDArray[np.int64]]:
        """Sample a text from the stationary distribution on, in blocks of word numbers."""
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
            # Rounding may move a draw past the end of its class.
            yield order[np.clip(position, (ends - np.bincount(self.class_of))[classes], ends[classes] - 1)]


def _entropy(probabilities: Floats) -> float:
    """-sum p ln p, in nats."""
    positive = probabilities[probabilities > 0]
    return -float(positive @ np.log(positive))


@dataclass
class ZipfConfig(CorpusConfig):
    """A seeded Markov source over a Zipfian vocabulary whose true perplexity is known."""

    name: str = "zipf"
    vocab_size: Annotated[int, Range(least=16)] = 10_000
    """Words of the source, without <unk> and </s>."""
    tokens: Annotated[int, Range(least=1000, most=1e10)] = 1_000_000
    """Training tokens; validation and test each have a tenth of this number."""
    seed: Annotated[int, Range(least=0)] = 1
    """Seed of the source and of its text; not the seed of training."""


@plugin("data", "zipf", ZipfConfig)
def source(config: ZipfConfig) -> Source:
    generator = ZipfSource.build(vocab_size=config.vocab_size, seed=config.seed)
    # Names sort like the numbers.
    digits = max(6, len(str(config.vocab_size - 1)))
    names = [f"w{number:0{digits}d}" for number in range(config.vocab_size)]

    def write_splits(scratch: Path) -> Splits:
        words = np.array([f"{name} ".encode() for name in names])
        for index, split in enumerate(SPLITS):
            num_tokens = config.tokens if split == "train" else config.tokens // 10
            with (scratch / split).open("wb") as file:
                for numbers in generator.draw(num_tokens, np.random.default_rng([config.seed, 1 + index])):
                    file.write(words[numbers].data)
        return {split: [TextFile.plain(scratch / split)] for split in SPLITS}

    return Source(
        f"zipf-{config.vocab_size}-words-{config.tokens}-tokens-seed-{config.seed}",
        {
            "name": config.name,
            "source": f"a Markov source over {config.vocab_size} words",
            "rule": {"vocab_size": config.vocab_size, "tokens": config.tokens, "seed": config.seed},
            "true_perplexity": generator.true_perplexity,
            "unigram_perplexity": generator.unigram_perplexity,
        },
        write_splits,
        config.token_rule,
        sentence_words=0,
        vocabulary=VocabularyRule(lexicon=names),  # includes words that the sample lacks
    )
