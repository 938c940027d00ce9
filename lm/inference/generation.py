"""Generate text word by word. Texts are sampled in batches and printed one after another.

Shapes: S texts in a batch.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout

import torch

from lm.config.inference import GenerateConfig
from lm.data.source import rule_of
from lm.data.text.subwords import SubwordVocabulary
from lm.data.text.tokenize import Joiner, PieceJoiner
from lm.data.text.vocabulary import EOS
from lm.inference.lines import read_prompt
from lm.inference.open_model import LoadedModel, load_model
from lm.model.base import repeat_stream
from lm.system.console import printable
from lm.system.devices import disable_tf32
from lm.system.randomness import generator_for

Show = Callable[[int, str], None]
"""Receives a text's number and its next words."""
MAX_TEXTS, MAX_SCORES = 256, 1 << 25
"""Maximum texts and word scores per batch."""


def generate(config: GenerateConfig) -> None:
    """Load the model and stream generated texts to stdout, word by word."""
    disable_tf32()
    with redirect_stdout(sys.stderr):  # stdout is reserved for the texts
        loaded = load_model(config, device=config.device)
    print_texts(loaded, config)


def sample_texts(loaded: LoadedModel, config: GenerateConfig) -> list[str]:
    """Return generated texts, each starting with the prompt."""
    texts = [""] * config.samples

    def show(number: int, text: str) -> None:
        texts[number] += text

    print_texts(loaded, config, show=show)
    return [text.removesuffix("\n") for text in texts]


def print_texts(loaded: LoadedModel, config: GenerateConfig, *, show: Show | None = None) -> None:
    """Sample the texts in batches and print them, or pass them to `show`."""
    vocabulary, rule, joiner = loaded.vocabulary, rule_of(loaded.data), Joiner
    prompt = read_prompt(config.prompt or "", rule=rule, vocabulary=vocabulary)
    prompt_ids = vocabulary.encode([EOS, *prompt]).tolist()
    if isinstance(vocabulary, SubwordVocabulary):
        prompt, joiner = vocabulary.decode(prompt_ids[1:]), PieceJoiner
    batch_size = max(1, min(MAX_TEXTS, MAX_SCORES // len(vocabulary)))
    for first in range(0, config.samples, batch_size):
        numbers = range(first, min(first + batch_size, config.samples))
        headings = config.samples > 1 and show is None
        page = Page(numbers, prompt=prompt, joiner=lambda: joiner(rule), headings=headings, show=show or print_part)
        for words in draw(loaded, config, prompt_ids, numbers=numbers):
            for number, word in zip(numbers, words, strict=True):
                page.end(number) if word is None else page.add(number, word)
        for number in numbers:
            page.end(number)


@torch.no_grad()
def draw(
    loaded: LoadedModel, config: GenerateConfig, prompt: Sequence[int], *, numbers: Sequence[int]
) -> Iterator[list[str | None]]:
    """Yield the next word of each text; None for texts that have ended.

    A text depends only on the seed and its number, not on the texts in the same batch.
    """
    model, vocabulary, device = loaded.model, loaded.vocabulary, loaded.model.device
    first_S, each_S = torch.zeros(len(numbers), dtype=torch.long), torch.arange(len(numbers))
    reading, state = model.read(torch.tensor(prompt, device=device)[:, None], model.initial_state(1))
    predictions = reading.at(first_S + len(prompt) - 1, first_S)
    state = repeat_stream(state, len(numbers))
    generators = [generator_for(config.seed, "generate", number) for number in numbers]
    sentences = [0] * len(numbers)
    for _ in range(config.max_words):
        uniform_S = torch.cat([torch.rand(1, generator=g, dtype=torch.float64) for g in generators])
        word_S = predictions.sample(
            uniform_S.to(device),
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            exclude_id=None if config.unknown_words else vocabulary.unk_id,
        )
        words = vocabulary.decode(word_S.tolist())
        going = [ended != config.max_sentences for ended in sentences]
        yield [word if goes else None for word, goes in zip(words, going, strict=True)]
        sentences = [n + (goes and word == EOS) for n, goes, word in zip(sentences, going, words, strict=True)]
        if all(ended == config.max_sentences for ended in sentences):
            return
        reading, state = model.read(word_S[None], state)
        predictions = reading.at(first_S, each_S)


def print_part(number: int, text: str) -> None:  # noqa: ARG001
    """Print the next words of a text."""
    sys.stdout.write(text)
    sys.stdout.flush()


class Page:
    """Shows texts in order: the current one word by word, later ones after the previous have ended."""

    def __init__(
        self,
        numbers: Sequence[int],
        *,
        prompt: Sequence[str],
        joiner: Callable[[], Joiner],
        headings: bool,
        show: Show = print_part,
    ) -> None:
        self.show = show
        self.joiners = {number: joiner() for number in numbers}
        self.texts = {number: f"--- {number + 1} ---\n" if headings else "" for number in numbers}
        """Text not printed yet."""
        self.ended: set[int] = set()
        for number in numbers:
            for word in prompt:
                self.add(number, word)

    def add(self, number: int, word: str) -> None:
        if word == EOS:
            self.joiners[number].end()
        self.texts[number] += "\n" if word == EOS else printable(self.joiners[number].add(word))
        self._print()

    def end(self, number: int) -> None:
        """Mark a text as complete; a second call has no effect."""
        if number not in self.ended:
            self.ended.add(number)
            self.texts[number] += "" if self.joiners[number].at_start else "\n"
            self._print()

    def _print(self) -> None:
        while self.texts:
            number = next(iter(self.texts))
            self.show(number, self.texts[number])
            self.texts[number] = ""
            if number not in self.ended:
                break
            del self.texts[number]
