"""Runs on subwords: metrics match their definitions, and every command supports such runs."""

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import lm
from lm.data.corpus import SplitText
from lm.data.text.vocabulary import SubwordVocabulary
from tests.conftest import TINY, Command, compare_runs, run_command
from tests.helpers.subword_text import PIECES, TEXTS

SETTINGS = [*TINY[3:], "data=text", "data.dir=mine", "data.min_count=3", "evaluate.streams=1"]
IN_PIECES = ["data.tokenizer=sentencepiece", f"data.vocab_size={PIECES}"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, a run on its words and one on subwords; both are scored as one stream."""
    place = tmp_path_factory.mktemp("subwords")
    (place / "mine").mkdir()
    for split, text in TEXTS.items():
        (place / f"mine/{split}.txt").write_bytes(text.encode())
    run_command(place, "train.py", *SETTINGS, "run_dir=words")
    told = run_command(place, "train.py", *SETTINGS, *IN_PIECES, "run_dir=pieces").stdout
    (place / "told.txt").write_text(told)
    return place


@pytest.fixture(scope="module")
def figures(folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """The output of evaluate.py by run and split."""
    found = {}
    for run in ("words", "pieces"):
        run_command(folder, "evaluate.py", f"checkpoint={run}", f"json={run}.json")
        found[run] = json.loads((folder / f"{run}.json").read_text())["splits"]
    return found


def words_of(split: str) -> list[list[str]]:
    return [[*line.split(), "</s>"] for line in TEXTS[split].split("\n") if line.split()]


@torch.no_grad()
def plain_nll(run: Path, split: str) -> list[tuple[str, float]]:
    """Return each word and the summed negative log-likelihood of its tokens, one token at a time from `</s>`."""
    loaded = lm.load(run)
    model, vocabulary = loaded.model, loaded.vocabulary
    state, previous, found = model.initial_state(1), vocabulary.eos_id, []
    for word in (word for line in words_of(split) for word in line):
        total = 0.0
        for token in vocabulary.encode([word]).tolist():
            hidden, state = model(torch.tensor([[previous]]), state)
            total -= float(model.output.log_prob(hidden)[0, 0, token])
            previous = token
        found.append((word, total))
    return found


@pytest.mark.parametrize("run", ["words", "pieces"])
@pytest.mark.parametrize("split", ["valid", "test"])
def test_perplexities_match_plain_loop_over_words(folder: Path, figures, run: str, split: str) -> None:
    scored = plain_nll(folder / run, split)
    nll, found = sum(value for _, value in scored), figures[run][split]
    assert found["words"] == len(scored)
    assert found["perplexity"] == pytest.approx(math.exp(nll / found["tokens"]), rel=1e-5)
    assert found["perplexity_per_word"] == pytest.approx(math.exp(nll / len(scored)), rel=1e-5)
    assert found["bits_per_character"] == pytest.approx(nll / math.log(2) / len(TEXTS[split]), rel=1e-5)
    counts = Counter(word for line in words_of("train") for word in line)
    known = [value for word, value in scored if counts[word] >= 3 and word != "<unk>"]
    assert found["perplexity_without_unk"] == pytest.approx(math.exp(sum(known) / len(known)), rel=1e-5)
    assert found["oov_rate"] == pytest.approx(1 - len(known) / len(scored))
    assert 0 < found["oov_rate"] < 0.5


def test_words_and_subwords_are_compared_on_same_words(folder: Path, figures) -> None:
    for split in ("valid", "test"):
        words, pieces = figures["words"][split], figures["pieces"][split]
        assert (words["words"], words["oov_rate"]) == (pieces["words"], pytest.approx(pieces["oov_rate"]))
        assert words["perplexity_per_word"] == words["perplexity"]
        assert pieces["tokens"] > pieces["words"]
    for run in ("words", "pieces"):
        summary = json.loads((folder / run / "summary.json").read_text())
        for split in ("valid", "test"):
            found = figures[run][split]
            assert summary[f"{split}_per_word"]["last"] == pytest.approx(found["perplexity_per_word"], rel=1e-6)
            bits = summary[f"{split}_bits_per_character"]["last"]
            assert bits == pytest.approx(found["bits_per_character"], rel=1e-6)
        assert summary["test_without_unk"]["last"] == pytest.approx(figures[run]["test"]["perplexity_without_unk"])


def test_comparison_includes_words_and_subwords(folder: Path, figures, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_runs([str(folder / "words"), str(folder / "pieces"), f"--out={folder / 'comparison'}"]) == 0
    rows = json.loads((folder / "comparison/comparison.json").read_text())
    for row, run in zip(rows, ("words", "pieces"), strict=True):
        expected = figures[run]["test"]["perplexity_without_unk"]
        assert row["test_perplexity_per_known_word"] == pytest.approx(expected)
    assert capsys.readouterr().out.count("per known word") == 2
    assert compare_runs([str(folder / "words"), f"--out={folder / 'comparison'}"]) == 0
    assert "per known word" not in capsys.readouterr().out


def test_run_prints_warning(folder: Path, figures) -> None:
    told, found = (folder / "told.txt").read_text(), figures["pieces"]
    assert f"{PIECES} subwords, {found['valid']['tokens'] / found['valid']['words']:.2f} per word" in told
    rows = {line[:24].strip(): line[24:].split() for line in told.splitlines()}
    assert rows["last, per word"] == [f"{found[split]['perplexity_per_word']:.2f}" for split in ("valid", "test")]
    bits = [f"{found[split]['bits_per_character']:.3f}" for split in ("valid", "test")]
    assert rows["last, bits per character"] == bits
    assert f"{found['test']['perplexity_without_unk']:.2f} per word excluding the" in told


def test_scores_do_not_depend_on_batch_size(folder: Path, figures) -> None:
    found = []
    for batch_size in (1, 3, 7):
        sizes = ["evaluate.streams=7", f"evaluate.batch_size={batch_size}"]
        run_command(folder, "evaluate.py", "checkpoint=pieces", "splits=[test]", "json=again.json", *sizes)
        found.append(json.loads((folder / "again.json").read_text())["splits"]["test"])
    for one in found:
        assert one["oov_rate"] == figures["pieces"]["test"]["oov_rate"]
        assert one["perplexity_without_unk"] == pytest.approx(found[0]["perplexity_without_unk"], rel=1e-6)
        assert one["perplexity_without_unk"] == pytest.approx(
            figures["pieces"]["test"]["perplexity_without_unk"], rel=0.1
        )


def test_other_text_needs_only_the_checkpoint(folder: Path, figures, command: Command, workspace: Path) -> None:
    """A copied checkpoint, without its corpus, gives the same results for the run's own text."""
    (workspace / "run.pt").write_bytes((folder / "pieces/checkpoints/last.pt").read_bytes())
    command("evaluate.py", "checkpoint=run.pt", f"data.dir={folder}/mine", "json=other.json")
    other = json.loads((workspace / "other.json").read_text())["splits"]
    same = [key for key in figures["pieces"]["test"] if key != "tokens_per_second"]
    for split in ("valid", "test"):
        assert {key: other[split][key] for key in same} == {key: figures["pieces"][split][key] for key in same}
    scored = command("evaluate.py", "checkpoint=run.pt", "mode=score", "state=carried", f"input={folder}/mine/test.txt")
    total = sum(float(line.split("\t")[0]) for line in scored.stdout.splitlines())
    assert -total == pytest.approx(other["test"]["tokens"] * math.log(other["test"]["perplexity"]), rel=1e-5)


def test_lines_are_scored_and_continued_in_subwords(folder: Path, command: Command) -> None:
    run = f"checkpoint={folder}/pieces"
    scored = command("evaluate.py", run, "mode=score", "input=-", stdin="bado Ω\n".encode()).stdout
    row = scored.rstrip("\n").split("\t")
    assert row[4] == "▁bado ▁ <0xCE> <0xA9> </s>"
    assert row[1:3] == ["5", "0"]
    assert len(command("evaluate.py", run, "mode=topk", "prompt='bado Ω'", "k=4").stdout.splitlines()) == 4
    done = command("lm/generate.py", run, "prompt='bado Ω'", "max_words=30", "samples=2")
    assert done.stderr == ""
    assert done.stdout.startswith("--- 1 ---\nbado Ω")
    assert "▁" not in done.stdout


def test_checkpoint_stores_sentencepiece_model_as_bytes(folder: Path) -> None:
    vocabulary = lm.load(folder / "pieces").vocabulary
    assert isinstance(vocabulary, SubwordVocabulary)
    prepared = next((folder / "data").glob(f"*-sp{PIECES}"))
    content = torch.load(folder / "pieces/checkpoints/last.pt", weights_only=True)
    held = content["vocabulary"]["files"]
    assert {name: data.numpy().tobytes() for name, data in held.items()} == {
        name: (prepared / name).read_bytes() for name in ("vocab.tsv", "sentencepiece.model", "words.txt")
    }


def test_subword_run_resumes_only_with_its_subwords(folder: Path) -> None:
    again = ["train.py", "resume=pieces", "trainer.max_steps=45"]
    error = run_command(folder, *again, *IN_PIECES, "data.vocab_size=290", check=2).stderr
    assert "data.vocab_size: 300 in the run, 290 now" in error
    assert "resumed  at step 40" in run_command(folder, *again).stdout


def test_extents() -> None:
    text = SplitText(np.zeros(20), 10, 100)
    assert text.per_word(3.0) == pytest.approx(9.0)
    assert text.bits_per_character(2.0) == pytest.approx(0.2)
    assert text.per_word(1e200) == math.inf
    assert math.isnan(text.bits_per_character(math.nan))
