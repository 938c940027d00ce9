"""Surprisal tables against scores of lines and against sums over the whole vocabulary."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import lm
from lm.inference import surprisal
from lm.inference.dynamic import Dynamic, DynamicSettings
from lm.inference.lines import Totals
from lm.inference.open_model import open_model
from lm.inference.surprisal import ADAPTED, CARRIED, COLUMNS, HEADER, as_tsv, measure, offsets, surprisals
from lm.output.base import IGNORE_INDEX
from tests.conftest import Command, Tiny
from tests.helpers.models import LAYERS, small_model

TEXT = "w000001 w000003  w000001\n\nnever w000002\n"


@pytest.mark.parametrize("layer", [*LAYERS, "hsm_huffman", "nce", "blackout", "self_normalized"])
def test_values_match_sums_over_the_vocabulary(tiny: Tiny, layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recover each word's probability from its own negative log-likelihood."""
    monkeypatch.setattr(surprisal, "BLOCK_VALUES", 100)
    model = small_model(tiny, layer)
    words_TB = torch.randint(0, model.vocab_size, (5, 3), generator=torch.Generator().manual_seed(1))
    predictions, _ = model.read(words_TB, model.initial_state(3))
    targets_TB = words_TB.roll(1, 0)
    targets_TB[2, 1] = IGNORE_INDEX
    found_3TB = measure(predictions, targets_TB)
    probs_VTB = torch.stack(
        [predictions.nll(torch.full_like(words_TB, w)).neg().exp() for w in range(model.vocab_size)]
    )
    for t in range(5):
        for b in range(3):
            if targets_TB[t, b] == IGNORE_INDEX:
                assert not found_3TB[:, t, b].any()
                continue
            probs = probs_VTB[:, t, b].double().tolist()
            own = probs[targets_TB[t, b]]
            entropy = -sum(p * math.log2(p) for p in probs)
            assert found_3TB[0, t, b].item() == pytest.approx(-math.log2(own), rel=1e-4)
            assert found_3TB[1, t, b].item() == pytest.approx(entropy, rel=1e-4)
            closer = sum(p > own * (1 + 1e-5) for p in probs), sum(p > own * (1 - 1e-5) for p in probs)
            assert closer[0] < found_3TB[2, t, b].item() <= closer[1] + 1


def test_certain_predictions_have_an_entropy_of_zero(tiny: Tiny) -> None:
    model = small_model(tiny, "full")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e6)
    predictions, _ = model.read(torch.tensor([[1, 2, 3]]), model.initial_state(3))
    entropy = measure(predictions, torch.tensor([[1, 2, 3]]))[1]
    assert not entropy.any() and not entropy.signbit().any()


@pytest.mark.parametrize("state", ["reset", "carried"])
def test_table_matches_scores(tiny_run: Path, command: Command, workspace: Path, state: str) -> None:
    (workspace / "in.txt").write_text(TEXT)
    ask = ["evaluate.py", f"checkpoint={tiny_run}", "input=in.txt", f"state={state}"]
    header, columns, *rows = command(*ask, "mode=surprisal").stdout.splitlines()
    scores = [json.loads(line) for line in command(*ask, "mode=score", "format=jsonl").stdout.splitlines()]
    assert header == (HEADER if state == "reset" else CARRIED) and columns.split("\t") == COLUMNS
    table = [dict(zip(COLUMNS, row.split("\t"), strict=True)) for row in rows]
    for number, score in enumerate(scores, 1):
        sentence = [row for row in table if row["sentence_id"] == str(number)]
        if not score["words"]:  # skipped
            assert not sentence and state == "carried"
            continue
        assert [int(row["token_id"]) for row in sentence] == list(range(1, len(score["words"]) + 1))
        assert ["<unk>" if row["unknown"] == "1" else row["token"] for row in sentence] == score["words"]
        bits = [-float(row["surprisal"]) * math.log(2) for row in sentence]
        assert bits == pytest.approx(score["word_log_probs"], abs=2e-6)
        entropy = [float(row["entropy"]) for row in sentence]
        *reduction, last = (row["entropy_reduction"] for row in sentence)
        expected = [max(0.0, before - after) for before, after in pairwise(entropy)]
        assert list(map(float, reduction)) == pytest.approx(expected, abs=2e-6) and last == "NA"
    command(*ask, "mode=surprisal", "format=jsonl", "out=table.jsonl")
    saved = [json.loads(line) for line in (workspace / "table.jsonl").read_text().splitlines()]
    assert [f"{token['surprisal']:.6f}" for token in saved] == [row["surprisal"] for row in table]


def test_offsets_point_at_the_words() -> None:
    line = "The  cat's hat-trick, İt"
    words = ["the", "cat's", "hat-trick", ",", "</s>"]
    assert [line[slice(*place)].lower() for place in offsets(line[:-3], words)[:-1]] == words[:-1]
    assert offsets("a b\n", ["a", "b", "</s>"]) == [(0, 1), (2, 3), (3, 3)]
    assert offsets("x 7 y", ["x", "seven", "y", "</s>"]) == [(0, 1), (None, None), (4, 5), (5, 5)]


def test_api_returns_the_same_table(tiny_run: Path, command: Command, workspace: Path) -> None:
    (workspace / "in.txt").write_text(TEXT)
    lines = command("evaluate.py", f"checkpoint={tiny_run}", "input=in.txt", "mode=surprisal").stdout
    table = lm.load(tiny_run).surprisal(TEXT.splitlines())
    assert "\n".join(as_tsv(table)) == lines.rstrip("\n")
    assert [line.split() for line in repr(table).splitlines()[2:]] == [line.split() for line in lines.splitlines()[2:]]
    assert repr(lm.load(tiny_run).surprisal(["w000001"] * 500)).endswith("\n... 1,000 tokens")
    assert [token.token for token in table if token.unknown] == ["never"]


def test_adaptation_learns_from_each_sentence_after_scoring_it(tiny_run: Path) -> None:
    """Repeat the updates with a plain SGD step on a second copy of the model."""
    lines = ["w000001 w000003", "w000002", "  ", "w000001 w000003"]
    loaded = open_model(str(tiny_run), device="cpu", which="last", verify=True)
    settings = DynamicSettings("sgd", lr=0.5, decay=0.0, segment=20)
    dynamic = replace(loaded, model=Dynamic(loaded.model, settings))
    tables = list(surprisals(lines, dynamic, Totals()))
    assert [tokens[0].sentence_id for tokens in tables] == [1, 2, 4], "blank lines are skipped, as in training"
    found = [[token.surprisal for token in tokens] for tokens in tables]
    copy = open_model(str(tiny_run), device="cpu", which="last", verify=True).model
    for line, values in zip(filter(str.strip, lines), found, strict=True):
        ids = torch.from_numpy(loaded.vocabulary.encode([*line.split(), "</s>"]).astype(int))
        words_T1 = torch.cat([torch.tensor([loaded.vocabulary.eos_id]), ids[:-1]])[:, None]
        weights = [weight.requires_grad_() for weight in copy.parameters()]
        hidden, _ = copy.core(copy.input(words_T1), copy.core.initial_state(1, device=copy.device), None)
        nll_T = F.cross_entropy(hidden[:, 0] @ copy.output.weight.T, ids, reduction="none")
        assert (nll_T / math.log(2)).tolist() == pytest.approx(values, rel=1e-4)
        grads = torch.autograd.grad(nll_T.mean(), weights)
        with torch.no_grad():
            for weight, grad in zip(weights, grads, strict=True):
                weight -= 0.5 * grad
    assert sum(found[2]) < sum(found[0])


def test_adapt_from_the_command_line(tiny_run: Path, command: Command, workspace: Path) -> None:
    (workspace / "in.txt").write_text("w000001 w000003\n" * 5)
    ask = ["evaluate.py", f"checkpoint={tiny_run}", "input=in.txt", "mode=surprisal", "format=jsonl"]
    rows = [json.loads(line) for line in command(*ask, "adapt=true", "evaluate.dynamic_lr=0.5").stdout.splitlines()]
    plain, tuned = (
        [json.loads(line)["surprisal"] for line in command(*ask, *more).stdout.splitlines()]
        for more in ([], ["adapt=true"])
    )
    assert tuned[:3] == pytest.approx(plain[:3], rel=1e-5), (
        "the first sentence is scored with the trained weights, also after tuning"
    )
    model = lm.load(tiny_run)
    adapted = model.surprisal(["w000001 w000003"] * 5, adapt=True)
    assert [token.surprisal for token in adapted] == pytest.approx(tuned, rel=1e-5)
    adapted = model.surprisal(["w000001 w000003"] * 5, adapt=True, dynamic_lr=0.5)
    assert [token.surprisal for token in adapted] == pytest.approx([row["surprisal"] for row in rows], rel=1e-5)
    assert [token.surprisal for token in model.surprisal("w000001 w000003")] == pytest.approx(plain[:3], rel=1e-5)
    first, last = ([row["surprisal"] for row in rows if row["sentence_id"] == number] for number in (1, 5))
    assert sum(last) < sum(first)
    assert command(*ask[:4], "adapt=true", "evaluate.dynamic_lr=0.5").stdout.startswith(ADAPTED)
