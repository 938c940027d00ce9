"""Generate text word by word. Texts are sampled in batches and printed one after another.

Shapes: S texts in a batch.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from itertools import groupby

import torch

from lm.config.inference import GenerateConfig
from lm.data.source import rule_of
from lm.data.text.tokenize import Joiner, PieceJoiner
from lm.data.text.vocabulary import EOS, SubwordVocabulary
from lm.inference.lines import read_prompt
from lm.inference.open_model import LoadedModel, load_model
from lm.model.base import repeat_stream
from lm.system.console import printable
from lm.system.devices import disable_tf32
from lm.system.randomness import generator_for

MAX_TEXTS, MAX_SCORES = 256, 1 << 25
"""Maximum texts and word scores per batch."""


def generate(config: GenerateConfig) -> None:
    """Load the model and stream generated texts to stdout, word by word."""
    disable_tf32()
    with redirect_stdout(sys.stderr):  # stdout is reserved for the texts
        loaded = load_model(config, device=config.device)
    print_texts(loaded, config)


def print_texts(loaded: LoadedModel, config: GenerateConfig) -> None:
    """Sample the texts and print them, with headings if there are several."""
    for number, parts in groupby(sampled(loaded, config), lambda part: part[0]):
        if config.samples > 1:
            sys.stdout.write(f"--- {number + 1} ---\n")
        for _, text in parts:
            sys.stdout.write(text)
            sys.stdout.flush()


def sample_texts(loaded: LoadedModel, config: GenerateConfig) -> list[str]:
    """Return generated texts, each starting with the prompt."""
    texts = groupby(sampled(loaded, config), lambda part: part[0])
    return ["".join(text for _, text in parts).removesuffix("\n") for _, parts in texts]


def sampled(loaded: LoadedModel, config: GenerateConfig) -> Iterator[tuple[int, str]]:
    """Sample the texts in batches; yield numbers of texts and their next words, a batch's first text word by word."""
    vocabulary, rule, joiner = loaded.vocabulary, rule_of(loaded.data), Joiner
    prompt = read_prompt(config.prompt or "", rule=rule, vocabulary=vocabulary)
    prompt_ids = vocabulary.encode([EOS, *prompt]).tolist()
    if isinstance(vocabulary, SubwordVocabulary):
        prompt, joiner = vocabulary.decode(prompt_ids[1:]), PieceJoiner
    batch_size = max(1, min(MAX_TEXTS, MAX_SCORES // len(vocabulary)))
    for first in range(0, config.samples, batch_size):
        numbers = range(first, min(first + batch_size, config.samples))
        texts = [Text(joiner(rule), prompt) for _ in numbers]
        yield first, texts[0].show()
        for words in draw(loaded, config, prompt_ids, numbers=numbers):
            for text, word in zip(texts, words, strict=True):
                text.add(word)
            yield first, texts[0].show()
        for number, text in zip(numbers, texts, strict=True):
            text.add(None)
            yield number, text.show()


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


class Text:
    """A generated text; `hidden` is the part that has not been shown yet."""

    def __init__(self, joiner: Joiner, prompt: Sequence[str]) -> None:
        self.joiner, self.hidden, self.ended = joiner, "", False
        for word in prompt:
            self.add(word)

    def add(self, word: str | None) -> None:
        """Append a word; None ends the text."""
        if word is None and not self.ended:
            self.ended = True
            self.hidden += "" if self.joiner.at_start else "\n"
        elif word == EOS:
            self.joiner.end()
            self.hidden += "\n"
        elif word is not None:
            self.hidden += printable(self.joiner.add(word))

    def show(self) -> str:
        """Return the part that has not been shown yet."""
        shown, self.hidden = self.hidden, ""
        return shown
