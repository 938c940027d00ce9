"""mode=topk: the head of the sorted distribution after each text."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from lm.inference.line_modes import next_words
from lm.inference.lines import make_block
from lm.runs.assembly import load
from tests.conftest import Command
from tests.helpers.models import LAYERS, VOCABULARY, log_distributions, small_model


@pytest.mark.parametrize("layer", LAYERS)
def test_next_words_are_the_likeliest_after_each_line(tiny, layer: str) -> None:
    model, generator = small_model(tiny, layer), np.random.default_rng(0)
    lines = [generator.integers(0, len(VOCABULARY), length) for length in (3, 0, 90, 3, 7, 1, 64)]
    block = make_block([np.append(line, VOCABULARY.eos_id) for line in lines])
    for batch_size in (1, 3, 50):
        answers = next_words(model, block, k=4, eos_id=VOCABULARY.eos_id, batch_size=batch_size)
        for line, (log_probs, ids) in zip(lines, answers, strict=True):
            expected, order = log_distributions(model, line)[-1].sort(descending=True)
            assert ids == order[:4].tolist()
            torch.testing.assert_close(torch.tensor(log_probs), expected[:4], atol=1e-5, rtol=0)


def test_the_command_tells_words_and_probabilities(tiny_run: Path, command: Command) -> None:
    model, vocabulary = load(tiny_run)
    ask = ["evaluate.py", f"checkpoint={tiny_run}", "mode=topk"]
    everything = [line.split("\t") for line in command(*ask, "prompt=w000001 w000002", "k=32").stdout.splitlines()]
    assert sorted(row[2] for row in everything) == sorted(vocabulary.words)
    assert sum(float(row[1]) for row in everything) == pytest.approx(1, abs=1e-4)
    state = model.initial_state(1)
    with torch.no_grad():
        hidden, _ = model.read(torch.from_numpy(vocabulary.encode(["</s>", "w000001", "w000002"]))[:, None], state)
        best = model.output.log_prob(hidden[-1])[0].max(0)
    assert everything[0][2] == vocabulary.words[best.indices]
    assert float(everything[0][1]) == pytest.approx(math.exp(best.values), abs=1e-5)

    lines = command(*ask, "input=-", "k=3", "format=jsonl", stdin=b"w000001 w000002\n\nw000003\n").stdout.splitlines()
    objects = [json.loads(line) for line in lines]
    assert [one["line"] for one in objects] == [1, 2, 3]
    assert objects[0]["words"] == [row[2] for row in everything[:3]]
    assert all(len(one["probabilities"]) == 3 for one in objects)


def test_mistakes_are_told(tiny_run: Path, command: Command) -> None:
    ask = ["evaluate.py", f"checkpoint={tiny_run}", "mode=topk"]
    for wrong, message in [
        ("prompt=flurb", "at least one word that the model knows; got flurb."),
        ("k=33", "k must be from 1 to the vocabulary's size (32); got 33."),
    ]:
        assert message in command(*ask, "prompt=w000001", wrong, check=2).stderr
