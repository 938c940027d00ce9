"""mode=score follows the chain rule per line, or over the whole text if carried; mode=topk sorts the distribution."""

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lm.inference.lines
from lm.data.text.tokenize import WORD_PATTERN, TokenRule
from lm.data.text.vocabulary import EOS, UNK, Vocabulary
from lm.inference.api import load
from lm.inference.lines import SHORT, LineBlock, json_line, measure_lines, next_words, read_prompt, write_lines
from lm.system.errors import UserError
from tests.conftest import Command
from tests.helpers.models import LAYERS, VOCABULARY, loaded_model, log_distributions, score_tokens, small_model

WORDS = Vocabulary.from_counts([("the", 9), ("method", 5), (".", 3)])
RULE = TokenRule(WORD_PATTERN, lowercase=True)
EOS_ID = VOCABULARY.eos_id


def random_lines(*lengths: int) -> list[np.ndarray]:
    """Return random word ids for lines of these lengths, each followed by `</s>`."""
    generator = np.random.default_rng(0)
    return [np.append(generator.integers(0, len(VOCABULARY), length), EOS_ID) for length in lengths]


def scores(model, lines, *, carried: bool, batch_size: int = 64, block: int = 1 << 16) -> list[np.ndarray]:
    """Score lines of ids in blocks of about `block` tokens."""
    words = [VOCABULARY.decode(line.tolist()) for line in lines]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm.inference.lines, "BLOCK_TOKENS", block)
        measured = list(measure_lines(words, loaded_model(model, batch_size=batch_size), carried=carried))
    assert [tokens for tokens, _ in measured] == words
    return [values for _, values in measured]


@pytest.mark.parametrize("layer", LAYERS)
def test_each_line_follows_chain_rule_from_zero_state(tiny, layer: str) -> None:
    model, lines = small_model(tiny, layer), random_lines(3, 0, 11, 3, 7, 1)
    for line, found in zip(lines, scores(model, lines, carried=False), strict=True):
        expected = [p[word] for word, p in zip(line, log_distributions(model, line), strict=False)]
        np.testing.assert_allclose(found, torch.stack(expected), atol=1e-5)


@pytest.mark.parametrize("layer", LAYERS)
def test_carried_state_matches_one_stream(tiny, layer: str) -> None:
    model, lines = small_model(tiny, layer), random_lines(3, 11, 3, 7, 1)
    text = np.concatenate(lines)
    expected = [p[word] for word, p in zip(text, log_distributions(model, text), strict=False)]
    found = np.concatenate(scores(model, lines, carried=True, block=12))
    np.testing.assert_allclose(found, torch.stack(expected), atol=1e-5)
    whole = score_tokens(model, text)
    assert -found.sum() / len(text) == pytest.approx(whole.loss, abs=1e-6)


@pytest.mark.parametrize("carried", [False, True])
def test_results_are_independent_of_batch_and_block_size(tiny, carried: bool) -> None:
    model, lines = small_model(tiny), random_lines(*range(12), 2500, *range(8, 0, -1), 70)
    expected = scores(model, lines, carried=carried)
    assert [len(one) for one in expected] == [len(line) for line in lines]
    for batch_size, block in [(1, 1), (3, 12), (21, 200), (500, 9)]:
        found = scores(model, lines, carried=carried, batch_size=batch_size, block=block)
        for one, same in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, same, atol=1e-5)


# ---- the command -----------------------------------------------------------------------------------------------------

TEXT = "w000000 w000003 nonsense w000001\n\nw000002\n  \nw000005 w000005 w000005 more nonsense\n"


@pytest.fixture
def ask(command: Command, tiny_run: Path, workspace: Path) -> Command:
    """Run the evaluation in a folder that contains the text."""
    (workspace / "text").mkdir()
    (workspace / "text/test.txt").write_text(TEXT)
    return partial(command, "evaluate.py", f"checkpoint={tiny_run}")


def rows(text: str) -> list[list[str]]:
    return [line.split("\t") for line in text.splitlines()]


def test_one_output_line_per_input_line(ask: Command, workspace: Path) -> None:
    done = ask("mode=score", "input=-", stdin=TEXT.encode())
    found = rows(done.stdout)
    assert [row[4] for row in found] == [
        "w000000 w000003 <unk> w000001 </s>",
        "</s>",
        "w000002 </s>",
        "</s>",
        "w000005 w000005 w000005 <unk> <unk> </s>",
    ]
    assert [(int(row[1]), int(row[2])) for row in found] == [(5, 1), (1, 0), (2, 0), (1, 0), (6, 2)]
    for row in found:
        each = [float(value) for value in row[3].split()]
        assert len(each) == int(row[1])
        assert float(row[0]) == pytest.approx(sum(each), abs=1e-5)
    assert "5 lines, 15 tokens, 3 of them unknown words; natural log-probability -" in done.stderr
    objects = ask("mode=score", "input=-", "format=jsonl", stdin=TEXT.encode()).stdout.splitlines()
    for row, one in zip(found, map(json.loads, objects), strict=True):
        assert row == [
            f"{one['log_prob']:.6f}",
            str(one["tokens"]),
            str(one["unknown"]),
            " ".join(f"{value:.6f}" for value in one["word_log_probs"]),
            " ".join(one["words"]),
        ]
    assert ask("mode=score", "input=text/test.txt", "out=scores.tsv").stdout == ""
    assert rows((workspace / "scores.tsv").read_text()) == found


def test_carried_command_matches_single_stream_perplexity(ask: Command, workspace: Path) -> None:
    ask("data.dir=text", "splits=[test]", "evaluate.streams=1", "json=figures.json")
    expected = json.loads((workspace / "figures.json").read_text())["splits"]["test"]
    ask("mode=score", "state=carried", "input=text/test.txt", "out=scores.tsv")
    found = rows((workspace / "scores.tsv").read_text())
    assert [int(row[1]) for row in found] == [5, 0, 2, 0, 6], "skipped lines keep their position"
    tokens = sum(int(row[1]) for row in found)
    assert tokens == expected["tokens"]
    assert math.exp(-sum(float(row[0]) for row in found) / tokens) == pytest.approx(expected["perplexity"], abs=1e-5)


# ---- mode=topk -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS)
def test_next_words_are_most_likely_after_each_line(tiny, layer: str) -> None:
    model, generator = small_model(tiny, layer), np.random.default_rng(0)
    lines = [generator.integers(0, len(VOCABULARY), length) for length in (3, 0, 90, 3, 7, 1, 64)]
    words = [[*VOCABULARY.decode(line.tolist()), EOS] for line in lines]
    for batch_size in (1, 3, 50):
        answers = next_words(words, loaded_model(model, batch_size=batch_size), k=4)
        for line, (found, probs) in zip(lines, answers, strict=True):
            expected, order = log_distributions(model, line)[-1].sort(descending=True)
            assert found == VOCABULARY.decode(order[:4].tolist())
            torch.testing.assert_close(torch.tensor(probs).log(), expected[:4], atol=1e-5, rtol=0)


def test_topk_writes_words_and_probabilities(tiny_run: Path, command: Command) -> None:
    loaded = load(tiny_run)
    model, vocabulary = loaded.model, loaded.vocabulary
    ask = ["evaluate.py", f"checkpoint={tiny_run}", "mode=topk"]
    everything = [line.split("\t") for line in command(*ask, "prompt=w000001 w000002", "k=32").stdout.splitlines()]
    assert sorted(row[2] for row in everything) == sorted(vocabulary.words)
    assert sum(float(row[1]) for row in everything) == pytest.approx(1, abs=1e-4)
    state = model.initial_state(1)
    with torch.no_grad():
        hidden, _ = model(torch.from_numpy(vocabulary.encode(["</s>", "w000001", "w000002"]))[:, None], state)
        best = model.output.log_prob(hidden[-1])[0].max(0)
    assert everything[0][2] == vocabulary.words[best.indices]
    assert float(everything[0][1]) == pytest.approx(math.exp(best.values), abs=1e-5)

    lines = command(*ask, "input=-", "k=3", "format=jsonl", stdin=b"w000001 w000002\n\nw000003\n").stdout.splitlines()
    objects = [json.loads(line) for line in lines]
    assert [one["line"] for one in objects] == [1, 2, 3]
    assert objects[0]["words"] == [row[2] for row in everything[:3]]
    assert all(len(one["probabilities"]) == 3 for one in objects)


# ---- reading and writing lines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["score", "surprisal", "topk"])
@pytest.mark.parametrize(
    ("source", "stdin", "message"),
    [
        ("-", b"", "input=- must have at least one line; it is empty."),
        ("-", b"w1\0w2\n", "input=- must be text, one sentence per line; standard input is binary."),
        ("-", b"w1\n\xff\xfe\n", "'standard input' must be UTF-8 text; got byte 0xff at offset 3"),
        ("none.txt", b"", "input=none.txt cannot be read: No such file or directory."),
        (".", b"", "input=. cannot be read: Is a directory."),
    ],
)
def test_invalid_input_is_one_paragraph(tiny_run: Path, command: Command, mode, source, stdin, message) -> None:
    done = command("evaluate.py", f"checkpoint={tiny_run}", f"mode={mode}", f"input={source}", check=2, stdin=stdin)
    assert done.stdout == ""
    which, paragraph = done.stderr.splitlines()
    assert "last.pt" in which
    assert paragraph.startswith(message)


@pytest.mark.parametrize("script", ["evaluate.py", "lm/generate.py"])
def test_invalid_checkpoint_is_one_paragraph(command: Command, workspace: Path, script: str) -> None:
    (workspace / "notes.txt").write_text("no checkpoint")
    for path, message in [("notes.txt", "it is not an archive as PyTorch writes it"), ("gone", "does not exist")]:
        done = command(script, f"checkpoint={path}", check=2)
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_prompt_uses_the_runs_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    def read(prompt: str) -> list[str]:
        return read_prompt(prompt, rule=RULE, vocabulary=WORDS)

    assert read("The method.\n\nthe") == ["the", "method", ".", EOS, "the"]
    assert read("the\n") == ["the", EOS]
    assert read("") == read(" \n") == []
    assert capsys.readouterr().err == ""
    assert read("the Flurb flurb <unk> gorp") == ["the", "flurb", "flurb", "<", "unk", ">", "gorp"]
    assert capsys.readouterr().err == "Not in the run's vocabulary, read as <unk>: flurb, <, unk, >, gorp\n"
    read(f"the {' '.join(map(str, range(13)))} \x1b")
    assert capsys.readouterr().err.endswith(" 8, 9 and 4 more\n")
    for prompt in ("flurb", "Flurb\ngorp\n"):
        with pytest.raises(UserError, match="prompt must contain at least one word in the vocabulary; got flurb"):
            read(prompt)
    with pytest.raises(UserError, match="at least one word in the vocabulary; got <unk>"):
        read_prompt(UNK, rule=TokenRule(r"\S+"), vocabulary=WORDS)


@given(st.lists(st.integers(1, 3000), min_size=1), st.integers(1, 9))
def test_batches_group_lines_of_similar_length(lengths: list[int], size: int) -> None:
    tokens = np.zeros(sum(lengths), np.int64)
    block = LineBlock(tokens, np.cumsum(lengths).tolist(), tokens)
    batches = list(block.batches(size))
    assert sorted(span for batch in batches for span in batch) == block.spans()
    for batch in batches:
        longest, *others = (end - start for start, _, end in batch)
        assert len(batch) <= size
        assert all(longest >= length >= longest / 2 - SHORT for length in others)


def test_output_file_is_written_atomically(tmp_path: Path) -> None:
    target = tmp_path / "out.tsv"
    write_lines(["a", "ж"], str(target))
    assert target.read_text(encoding="utf-8") == "a\nж\n"

    def broken():
        yield "b"
        raise UserError("the input is broken")

    with pytest.raises(UserError, match="broken"):
        write_lines(broken(), str(target))
    assert target.read_text(encoding="utf-8") == "a\nж\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out.tsv"]
    with pytest.raises(UserError, match="cannot be written: No such file or directory"):
        write_lines(["a"], str(tmp_path / "none/out.tsv"))


def test_json_escapes_only_control_characters() -> None:
    assert json_line({"words": ["ж", "é"]}) == '{"words": ["ж", "é"]}'
    assert json_line({"words": ["\x9bA"], "p": float("inf")}) == '{"words": ["\\u009bA"], "p": null}'
