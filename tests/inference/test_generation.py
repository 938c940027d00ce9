"""Generation: correct distribution, reproducible for a seed, texts printed in order."""

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.config.inference import GenerateConfig
from lm.data.text.vocabulary import EOS, UNK
from lm.inference.api import load
from lm.inference.generation import draw, print_texts
from lm.model.language_model import LanguageModel
from tests.conftest import Command
from tests.helpers.distributions import chi_square, defined_distribution
from tests.helpers.models import LAYERS, VOCABULARY, loaded_model, log_distributions, small_model

CHOICES: list[dict[str, object]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 4, "temperature": 1.4},
    {"top_p": 0.7, "unknown_words": True},
]


def settings(**changes: object) -> GenerateConfig:
    values: dict[str, Any] = {"checkpoint": "run", "max_words": 12, "device": "cpu"}
    return GenerateConfig(**values | changes)


def texts(
    model: LanguageModel, numbers: Sequence[int], *, prompt: Sequence[int] = (), **changes: object
) -> list[list[str | None]]:
    """Return the words of each text."""
    prompt = [VOCABULARY.eos_id, *prompt]
    steps = draw(loaded_model(model), settings(**changes), prompt, numbers=numbers)
    return [list(text) for text in zip(*steps, strict=True)]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("unknown_words", [False, True])
def test_temperature_zero_matches_greedy_loop(tiny, layer: str, unknown_words: bool) -> None:
    model, words = small_model(tiny, layer), [3, 1]
    (found,) = texts(model, [0], prompt=words, temperature=0.0, unknown_words=unknown_words)
    for word in found:
        log_prob = log_distributions(model, words)[-1].clone()
        if not unknown_words:
            log_prob[VOCABULARY.unk_id] = -torch.inf
        words.append(int(log_prob.argmax()))
        assert word == VOCABULARY.words[words[-1]]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_word_pairs_follow_chain_rule(tiny, layer: str, choice: dict[str, object]) -> None:
    """The second word verifies that the state is carried."""
    model, num_draws, size = small_model(tiny, layer), 3000, len(VOCABULARY)
    rules = dict(choice)
    without = None if rules.pop("unknown_words", False) else VOCABULARY.unk_id
    first = defined_distribution(log_distributions(model, [5])[-1], exclude_id=without, **rules)  # type: ignore[arg-type]
    second = [
        defined_distribution(log_distributions(model, [5, word])[-1], exclude_id=without, **rules)  # type: ignore[arg-type]
        for word in range(size)
    ]
    probs = torch.stack([p * rest for p, rest in zip(first, second, strict=True)]).flatten()
    drawn = texts(model, range(num_draws), prompt=[5], max_words=2, **choice)
    pairs = torch.tensor([VOCABULARY.encode(text) @ [size, 1] for text in drawn])
    assert chi_square(torch.bincount(pairs, minlength=size**2).double(), probs.double(), num_draws) > 1e-4


def test_text_depends_only_on_seed_and_number(tiny) -> None:
    model = small_model(tiny)
    together = texts(model, range(5))
    assert texts(model, range(5)) == together
    assert [texts(model, [number])[0] for number in range(5)] == together
    assert texts(model, range(5), max_words=7) == [text[:7] for text in together]
    assert len({tuple(text) for text in together}) == 5
    assert texts(model, range(5), seed=2) != together


def test_text_stops_after_max_sentences(tiny) -> None:
    model = small_model(tiny)
    free = texts(model, range(40), max_words=30)
    for whole, short in zip(free, texts(model, range(40), max_words=30, max_sentences=2), strict=True):
        kept = [word for word in short if word is not None]
        assert kept == whole[: len(kept)]
        assert set(short[len(kept) :]) <= {None}
        assert kept.count(EOS) <= 2
        assert kept[-1] == EOS if kept.count(EOS) == 2 else len(kept) == min(30, len(short))
    assert not any(UNK in text for text in free)
    assert any(UNK in text for text in texts(model, range(40), unknown_words=True))


@pytest.mark.parametrize("layer", LAYERS)
def test_tiny_top_p_is_greedy(tiny, layer: str) -> None:
    model = small_model(tiny, layer)
    assert texts(model, range(3), top_p=1e-46) == texts(model, range(3), temperature=0.0)


class Pipe(io.StringIO):
    """A pipe whose reader closes it after a while."""

    def write(self, text: str) -> int:
        if self.tell() > 20_000:
            raise BrokenPipeError
        return super().write(text)


def test_texts_are_generated_in_batches(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded_model(small_model(tiny))
    monkeypatch.setattr("sys.stdout", Pipe())
    with pytest.raises(BrokenPipeError):
        print_texts(model, settings(samples=10**9, max_words=1))
    printed = sys.stdout.getvalue()
    monkeypatch.setattr("lm.inference.generation.MAX_TEXTS", 7)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    print_texts(model, settings(samples=50, max_words=1))
    assert printed.startswith(sys.stdout.getvalue()), "batches do not change the texts"
    assert sys.stdout.getvalue().count("---\n") == 50


# ---- the command -----------------------------------------------------------------------------------------------------


def test_command_continues_the_prompt(tiny_run: Path, command: Command) -> None:
    vocabulary = load(tiny_run).vocabulary
    ask = ["lm/generate.py", f"checkpoint={tiny_run}", "prompt=w000001 nonsense", "max_words=20"]
    done = command(*ask)
    assert done.stderr == "Not in the run's vocabulary, read as <unk>: nonsense\n"
    assert done.stdout.startswith("w000001 nonsense")
    words = done.stdout.split()
    assert len(words) <= 22
    assert set(words[2:]) <= set(vocabulary.words) - {UNK, EOS}
    assert command(*ask).stdout == done.stdout
    three = command(*ask, "samples=3").stdout
    assert three.startswith(f"--- 1 ---\n{done.stdout}--- 2 ---\nw000001 nonsense")
    assert command(*ask, "seed=2").stdout != done.stdout


def test_prompt_without_known_words_is_reported(tiny_run: Path, command: Command) -> None:
    done = command("lm/generate.py", f"checkpoint={tiny_run}", "prompt=only nonsense", check=2)
    assert done.stdout == ""
    assert done.stderr.startswith("prompt must contain at least one word in the vocabulary; got only, nonsense.")
