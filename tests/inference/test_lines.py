"""Lines of text: unreadable input, prompts, batches, output files."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.data.text.tokenize import WORD_PATTERN, TokenRule
from lm.data.text.vocabulary import EOS, UNK, Vocabulary
from lm.inference.lines import SHORT, json_line, make_block, read_prompt, write_lines
from lm.system.errors import UserError
from tests.conftest import Command

VOCABULARY = Vocabulary.from_counts([("the", 9), ("method", 5), (".", 3)], min_count=1)
RULE = TokenRule(WORD_PATTERN, lowercase=True)


@pytest.mark.parametrize("mode", ["score", "topk"])
@pytest.mark.parametrize(
    ("source", "stdin", "message"),
    [
        ("-", b"", "input=- must hold at least one line; it is empty."),
        ("-", b"w1\0w2\n", "input=- must be text, one sentence per line; standard input is binary."),
        ("-", b"w1\n\xff\xfe\n", "'standard input' must be UTF-8 text; got byte 0xff at offset 3"),
        ("none.txt", b"", "input=none.txt cannot be read: No such file or directory."),
        (".", b"", "input=. cannot be read: Is a directory."),
    ],
)
def test_what_is_no_text_is_one_paragraph(tiny_run: Path, command: Command, mode, source, stdin, message) -> None:
    done = command("evaluate.py", f"checkpoint={tiny_run}", f"mode={mode}", f"input={source}", check=2, stdin=stdin)
    assert done.stdout == ""
    which, paragraph = done.stderr.splitlines()
    assert "its last weights" in which
    assert paragraph.startswith(message)


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["mode=score"], ["mode=score reads a text; got none. Try input=FILE, or input=- for standard input"]),
        (["mode=topk", "prompt=a", "input=b"], ["mode=topk reads input or prompt; got both. Leave one out"]),
        (["mode=score", "prompt=a"], ["prompt is not a setting of mode=score; it belongs to mode=topk."]),
        (["input=a"], ["input is not a setting of mode=perplexity; it belongs to mode=score or mode=topk."]),
        (["mode=score", "input=a", "json=b", "out="], ["data.dir and json belong to mode=perplexity", "out must not"]),
        (["mode=topk", "input=a", "state=carried"], ["state=carried belongs to mode=score; mode=topk reads each line"]),
        (["mode=rank"], ["mode must be one of perplexity, score, topk, projector; got 'rank'."]),
    ],
)
def test_settings_that_do_not_go_with_the_mode_are_reported(command: Command, words, messages) -> None:
    error = command("evaluate.py", "checkpoint=x", *words, check=2).stderr.splitlines()
    assert len(error) == len(messages)
    assert all(line.startswith(message) for line, message in zip(error, messages, strict=True))


@pytest.mark.parametrize("script", ["evaluate.py", "lm/generate.py"])
def test_a_checkpoint_that_is_none_is_one_paragraph(command: Command, workspace: Path, script: str) -> None:
    (workspace / "notes.txt").write_text("no checkpoint")
    for path, message in [("notes.txt", "it is not an archive as PyTorch writes it"), ("gone", "does not exist")]:
        done = command(script, f"checkpoint={path}", check=2)
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_prompt_is_read_by_the_runs_rule(capsys: pytest.CaptureFixture[str]) -> None:
    def read(prompt: str) -> list[str]:
        return read_prompt(prompt, rule=RULE, vocabulary=VOCABULARY)

    assert read("The method.\n\nthe") == ["the", "method", ".", EOS, "the"]
    assert read("the\n") == ["the", EOS]
    assert read("") == read(" \n") == []
    assert capsys.readouterr().err == ""
    assert read("the Flurb flurb <unk> gorp") == ["the", "flurb", "flurb", "<", "unk", ">", "gorp"]
    assert capsys.readouterr().err == "Not in the run's vocabulary, read as <unk>: flurb, <, unk, >, gorp\n"
    read(f"the {' '.join(map(str, range(13)))} \x1b")
    assert capsys.readouterr().err.endswith(" 8, 9 and 4 more\n")
    for prompt in ("flurb", "Flurb\ngorp\n"):
        with pytest.raises(UserError, match="prompt must hold at least one word that the model knows; got flurb"):
            read(prompt)
    with pytest.raises(UserError, match="at least one word that the model knows; got <unk>"):
        read_prompt(UNK, rule=TokenRule(r"\S+"), vocabulary=VOCABULARY)


@given(st.lists(st.integers(1, 3000), min_size=1), st.integers(1, 9))
def test_batches_hold_every_line_once_beside_lines_of_about_its_length(lengths: list[int], size: int) -> None:
    batches = list(make_block([np.zeros(length, np.int64) for length in lengths]).batches(size))
    assert sorted(number for batch in batches for number in batch) == list(range(len(lengths)))
    for batch in batches:
        longest, *others = (lengths[number] for number in batch)
        assert len(batch) <= size
        assert all(longest >= length >= longest / 2 - SHORT for length in others)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
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


def test_json_keeps_letters_and_escapes_what_steers_a_terminal() -> None:
    assert json_line({"words": ["ж", "é"]}) == '{"words": ["ж", "é"]}'
    assert json_line({"words": ["\x9bA"], "p": float("inf")}) == '{"words": ["\\u009bA"], "p": null}'
