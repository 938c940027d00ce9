"""Reference implementation of interpolated Kneser-Ney, with dictionaries."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache

import torch

from lm.ngram.model import NgramModel, NgramPredictor

Ngram = tuple[int, ...]


class SlowKneserNey:
    """p(word | context) by the formulas of Chen and Goodman; n-grams are tuples."""

    def __init__(
        self,
        tokens: Sequence[int],
        *,
        order: int,
        vocab_size: int,
        eos: int,
        modified: bool,
        min_counts: Sequence[int] | None = None,
    ) -> None:
        self.order, self.vocab_size, self.eos = order, vocab_size, eos
        self.min_counts = [1] * order if min_counts is None else list(min_counts)
        self.occurrences: list[Counter[Ngram]] = [Counter() for _ in range(order + 1)]
        for sentence in self.sentences(tokens):
            padded = (eos, *sentence)
            for end in range(2, len(padded) + 1):
                for n in range(1, min(order, end) + 1):
                    self.occurrences[n][padded[end - n : end]] += 1
        self.counts = [self._adjusted(n) for n in range(order + 1)]
        self.discounts = [self._discounts(self.counts[n], modified) for n in range(order + 1)]
        self.followers: list[dict[Ngram, list[Ngram]]] = [defaultdict(list) for _ in range(order + 1)]
        for n in range(1, order + 1):
            for ngram in self.counts[n]:
                self.followers[n][ngram[:-1]].append(ngram)
        self.prob = cache(self._prob)

    def sentences(self, tokens: Sequence[int]) -> list[Ngram]:
        found: list[Ngram] = []
        sentence: list[int] = []
        for word in tokens:
            sentence.append(word)
            if word == self.eos:
                found.append(tuple(sentence))
                sentence = []
        return [*found, tuple(sentence)] if sentence else found

    def _adjusted(self, n: int) -> dict[Ngram, int]:
        if n in (0, self.order):
            return dict(self.occurrences[n])
        before: dict[Ngram, set[int]] = defaultdict(set)
        for longer in self.occurrences[n + 1]:
            before[longer[1:]].add(longer[0])
        return {
            ngram: count if n > 1 and ngram[0] == self.eos else len(before[ngram])
            for ngram, count in self.occurrences[n].items()
        }

    @staticmethod
    def _discounts(counts: dict[Ngram, int], modified: bool) -> tuple[float, float, float]:
        n1, n2, n3, n4 = (sum(count == k for count in counts.values()) for k in (1, 2, 3, 4))
        if n1 == 0 or n2 == 0:
            return 0.5, 0.5, 0.5
        y = n1 / (n1 + 2 * n2)
        if modified and n3 and n4:
            three = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
            if 0 < three[1] < 2 and 0 < three[2] < 3:
                return three
        return y, y, y

    def _prob(self, word: int, context: Ngram) -> float:
        """`context` has at most order - 1 words and stays within a sentence."""
        n = len(context) + 1
        lower = self.prob(word, context[1:]) if context else 1 / self.vocab_size
        followers = self.followers[n].get(context, [])
        total = sum(self.counts[n][ngram] for ngram in followers)
        if not total:
            return lower
        spared = own = 0.0
        for ngram in followers:
            count = self.counts[n][ngram]
            discount = self.discounts[n][min(count, 3) - 1]
            if n > 1 and self.occurrences[n][ngram] < self.min_counts[n - 1]:
                spared += count
                continue
            spared += discount
            if ngram[-1] == word:
                own = (count - discount) / total
        return own + spared / total * lower

    def context(self, history: Sequence[int]) -> Ngram:
        """Return the words before a position that the model sees; the text starts after `</s>`."""
        words = [self.eos, *history]
        start = len(words) - 1
        while start > 0 and words[start] != self.eos:
            start -= 1
        seen = tuple(words[start:])
        return seen[-(self.order - 1) :] if self.order > 1 else ()


def log_probs(model: NgramModel, text: Sequence[int]) -> list[float]:
    """Return the log-probability of each word of a text that starts after `</s>`."""
    predictor = NgramPredictor(model)
    words = torch.tensor([[model.eos_id], *([word] for word in text[:-1])])
    predictions, _ = predictor.read(words, predictor.initial_state(1))
    return (-predictions.nll(torch.tensor(text)[:, None])).flatten().tolist()  # type: ignore[no-any-return]


class SlowArpa:
    """Reads an ARPA file into dictionaries, and backs off by the definition of the format."""

    def __init__(self, text: str) -> None:
        self.log_probs: dict[tuple[str, ...], float] = {}
        self.back_offs: dict[tuple[str, ...], float] = {}
        order = 0
        for line in text.splitlines():
            if line.endswith("-grams:"):
                order = int(line[1:-7])
            elif order and len(parts := line.split()) > order:
                ngram = tuple(parts[1 : order + 1])
                self.log_probs[ngram] = float(parts[0])
                self.back_offs[ngram] = float(parts[order + 1]) if len(parts) > order + 1 else 0.0

    def log_prob(self, *words: str) -> float:
        """Base-10 logarithm of the last word's probability after the others."""
        if words in self.log_probs:
            return self.log_probs[words]
        return self.back_offs.get(words[:-1], 0.0) + self.log_prob(*words[1:])
