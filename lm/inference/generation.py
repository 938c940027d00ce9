"""Writing text with a trained model, word by word; many texts are drawn side by side and shown one after another.

Shapes: S texts drawn side by side, D width of the hidden state.
"""

import sys
from collections.abc import Callable, Iterator, Sequence

import torch

from lm.config.commands import GenerateConfig
from lm.config.groups import DataConfig
from lm.data.settings import rule_of
from lm.data.text.detokenize import Joiner, PieceJoiner
from lm.data.text.subwords import SubwordVocabulary
from lm.data.text.vocabulary import EOS, Vocabulary
from lm.inference.lines import read_prompt
from lm.model.language_model import LanguageModel
from lm.model.state import repeat_stream
from lm.system.console import printable
from lm.system.randomness import generator_for

MOST_SCORES = 1 << 25
"""Scores of words held at once; bounds how many texts are drawn side by side over a large vocabulary."""


def generate(model: LanguageModel, vocabulary: Vocabulary, *, data: DataConfig, config: GenerateConfig) -> None:
    """Write the texts that are asked for to stdout, the words as they are drawn; `data` is what the model was fed."""
    rule = rule_of(data)
    prompt = read_prompt(config.prompt or "", rule=rule, vocabulary=vocabulary)
    prompt_ids = vocabulary.encode([EOS, *prompt]).tolist()
    if isinstance(vocabulary, SubwordVocabulary):
        page = Page(config.samples, prompt=vocabulary.decode(prompt_ids[1:]), joiner=lambda: PieceJoiner(rule))
    else:
        page = Page(config.samples, prompt=prompt, joiner=lambda: Joiner(rule))
    at_once = max(1, MOST_SCORES // len(vocabulary))
    for first in range(0, config.samples, at_once):
        numbers = range(first, min(first + at_once, config.samples))
        for words in draw(model, prompt_ids, numbers=numbers, vocabulary=vocabulary, config=config):
            for number, word in zip(numbers, words, strict=True):
                page.end(number) if word is None else page.add(number, word)
        for number in numbers:
            page.end(number)


@torch.no_grad()
def draw(
    model: LanguageModel,
    prompt: Sequence[int],
    *,
    numbers: Sequence[int],
    vocabulary: Vocabulary,
    config: GenerateConfig,
) -> Iterator[list[str | None]]:
    """A word for each of the texts at a time; None for those that have ended.

    A text's randomness depends on the seed and on its own number, so that the same is drawn whatever stands beside it.
    """
    device = model.device
    hidden_TSD, state = model(torch.tensor(prompt, device=device)[:, None], model.initial_state(1))
    hidden_SD = hidden_TSD[-1].expand(len(numbers), -1)
    state = repeat_stream(state, len(numbers))
    generators = [generator_for(config.seed, "generate", number) for number in numbers]
    sentences = [0] * len(numbers)
    for _ in range(config.max_words):
        uniform_S = torch.cat([torch.rand(1, generator=g, dtype=torch.float64) for g in generators])
        word_S = model.output.sample(
            hidden_SD,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            without=None if config.unknown_words else vocabulary.unk_id,
            uniform=uniform_S.to(device),
        )
        words = vocabulary.decode(word_S.tolist())
        yield [word if sentences[i] != config.max_sentences else None for i, word in enumerate(words)]
        sentences = [
            ended + (word == EOS and ended != config.max_sentences)
            for ended, word in zip(sentences, words, strict=True)
        ]
        if all(ended == config.max_sentences for ended in sentences):
            return
        hidden_1SD, state = model(word_S[None], state)
        hidden_SD = hidden_1SD[0]


class Page:
    """Shows texts one after another on stdout, although they are drawn side by side."""

    def __init__(self, samples: int, *, prompt: Sequence[str], joiner: Callable[[], Joiner]) -> None:
        self.joiners = [joiner() for _ in range(samples)]
        self.pending = [""] * samples
        self.ended: set[int] = set()
        self.shown = -1
        for number in range(samples):
            for word in prompt:
                self.add(number, word)
        self._show_next()

    def add(self, number: int, word: str) -> None:
        """A text goes on: at once where it is the one being shown, else when its turn comes."""
        if word == EOS:
            self.joiners[number].end()
        self.pending[number] += "\n" if word == EOS else printable(self.joiners[number].add(word))
        self._show()

    def end(self, number: int) -> None:
        """A text is complete; said again, it changes nothing."""
        if number not in self.ended:
            self.ended.add(number)
            self.pending[number] += "" if self.joiners[number].at_start else "\n"
            self._show()
        while self.shown in self.ended:
            self._show_next()

    def _show_next(self) -> None:
        self.shown += 1
        if self.shown < len(self.pending):
            heading = f"--- {self.shown + 1} ---\n" if len(self.pending) > 1 else ""
            self.pending[self.shown] = heading + self.pending[self.shown]
            self._show()

    def _show(self) -> None:
        if 0 <= self.shown < len(self.pending) and self.pending[self.shown]:
            sys.stdout.write(self.pending[self.shown])
            sys.stdout.flush()
            self.pending[self.shown] = ""
