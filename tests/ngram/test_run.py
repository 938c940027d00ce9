"""N-gram runs: work with every command, can be recreated after a kill, and report errors in one paragraph."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml

import lm
from lm.compare import compare
from lm.compare.rows import sections
from lm.compare.run_records import read_run
from lm.system.errors import UserError
from lm.training.provenance import read_starts
from tests.conftest import TINY, run_command

DATA = [word for word in TINY if word.startswith("data")]
COUNT = ["lm/ngram/__main__.py", *DATA, "order=3"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a neural run, an n-gram run on the same corpus, and its ARPA file."""
    folder = tmp_path_factory.mktemp("ngram")
    run_command(folder, "train.py", *TINY, "run_dir=runs/lstm")
    run_command(folder, *COUNT, "run_dir=runs/kn", "out=kn.arpa")
    return folder


def perplexities(place: Path, *arguments: str) -> dict[str, float]:
    run_command(place, "evaluate.py", *arguments, "json=found.json")
    report = json.loads((place / "found.json").read_text())
    return {split: figures["perplexity"] for split, figures in report["splits"].items()}


def test_run_directory(place: Path) -> None:
    run = read_run(place / "runs/kn")
    assert run.finished and run.layer == "3-gram" and run.kind == "ngram"
    assert run.summary is not None and run.summary["parameters"] == sum(run.summary["ngrams"])
    assert run.perplexity("valid", "last") == run.summary["valid"]["last"]
    assert run.settings["order"] == 3 and run.settings["data.name"] == "zipf"
    assert list((place / "runs/kn").glob("events.out.tfevents.*"))
    assert "3-gram" in (place / "runs/kn/run.log").read_text()
    content = torch.load(place / "runs/kn/checkpoints/last.pt", weights_only=True)
    assert content["kind"] == "ngram"


def test_evaluation_matches_summary_for_any_streams(place: Path) -> None:
    summary = json.loads((place / "runs/kn/summary.json").read_text())
    for more in ([], ["evaluate.streams=5"], ["evaluate.streams=1", "evaluate.batch_size=1"]):
        found = perplexities(place, "checkpoint=runs/kn", *more)
        assert found["valid"] == pytest.approx(summary["valid"]["last"], rel=1e-12)
        assert found["test"] == pytest.approx(summary["test"]["last"], rel=1e-12)


def test_commands_use_ngram_run(place: Path) -> None:
    loaded = lm.load(place / "runs/kn")
    assert repr(loaded).startswith("TrainedModel(3-gram, 32 words, ")
    best = loaded.next_word("w000001", k=3)
    done = run_command(place, "evaluate.py", "checkpoint=runs/kn", "mode=topk", "prompt=w000001", "k=3")
    assert [line.split("\t")[2] for line in done.stdout.splitlines()] == [word for word, _ in best]
    (place / "lines").write_text("w000001 w000002\n")
    done = run_command(place, "evaluate.py", "checkpoint=runs/kn", "mode=score", "input=lines")
    assert float(done.stdout.split("\t")[0]) == pytest.approx(loaded.score("w000001 w000002").log_prob, abs=1e-5)
    once, again = (
        run_command(place, "lm/generate.py", "checkpoint=runs/kn", "max_words=8", "samples=2", "top_p=0.9").stdout
        for _ in range(2)
    )
    assert once == again and len(once.split()) > 8
    done = run_command(place, "evaluate.py", "checkpoint=runs/kn", "mode=projector", check=2)
    assert "mode=projector" in done.stderr
    done = run_command(place, "train.py", "resume=runs/kn", check=2)
    assert "is of kind 'ngram', which cannot be trained" in done.stderr


def test_arpa_file_matches_counted_model(place: Path) -> None:
    run_command(place, *COUNT, "run_dir=runs/read", "arpa=kn.arpa", "order=2")
    counted, read = (json.loads((place / f"runs/{name}/summary.json").read_text()) for name in ("kn", "read"))
    assert read["ngrams"] == counted["ngrams"], "the order comes from the file"
    assert read["test"]["last"] == pytest.approx(counted["test"]["last"], rel=1e-6)
    assert yaml.safe_load((place / "runs/read/config.yaml").read_text())["order"] == 3


def test_mixture_is_evaluated_saved_and_compared(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = [perplexities(place, f"checkpoint=runs/{name}") for name in ("lstm", "kn")]
    mixed = perplexities(place, "checkpoint=runs/lstm", "mix=[runs/kn]", "out=runs/mixed")
    assert mixed["valid"] < min(figures["valid"] for figures in alone)
    assert perplexities(place, "checkpoint=runs/mixed") == pytest.approx(mixed, rel=1e-9)
    given = perplexities(place, "checkpoint=runs/lstm", "mix=[runs/kn]", "weights=[1,0]")
    assert given == pytest.approx(alone[0], rel=1e-6)
    twice = perplexities(place, "checkpoint=runs/kn", "mix=[runs/kn]")
    assert twice == pytest.approx(alone[1], rel=1e-9)
    run = read_run(place / "runs/mixed")
    (start,) = read_starts(run.path)
    assert start["command"].endswith("checkpoint=runs/lstm 'mix=[runs/kn]' out=runs/mixed json=found.json")
    assert run.layer == "mixture" and run.perplexity("test", "last") == pytest.approx(mixed["test"])
    compare([place / f"runs/{name}" for name in ("lstm", "kn", "mixed")], out=None)
    labels = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[3:6]]
    assert labels == ["mixture of lstm + kn (best)", "3-gram", "full"]
    (row, *_) = sections([run])[0].rows
    assert (row.epochs, row.runs[0].trained) == (None, False)
    again = run_command(place, "evaluate.py", "checkpoint=runs/lstm", "mix=[runs/kn]", "out=runs/mixed", check=2)
    assert "already holds a run, which is never overwritten" in again.stderr


def test_snm_run_is_evaluated_mixed_and_compared(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_command(place, COUNT[0], *DATA, "features=skip5", "run_dir=runs/snm")
    summary = json.loads((place / "runs/snm/summary.json").read_text())
    found = perplexities(place, "checkpoint=runs/snm", "mix=[runs/lstm]", "weights=[1,0]")
    assert found["test"] == pytest.approx(summary["test"]["last"], rel=1e-6)
    assert repr(lm.load(place / "runs/snm")).startswith("TrainedModel(SNM skip5, 32 words, ")
    compare([place / f"runs/{name}" for name in ("kn", "snm")], out=None)
    assert "SNM skip5" in capsys.readouterr().out
    (place / "list").write_text("u1 w000001 w000002\nu1 w000003\n")
    scored = ["checkpoint=runs/snm", "mode=score", "format=nbest", "input=list", "best=same"]
    cache = ["cache=unigram", "cache_size=9", "cache_decay=0.9", "cache_weight=0.2"]
    assert run_command(place, "evaluate.py", *scored, *cache).stdout.startswith("u1 ")


def test_cache_is_tuned_saved_and_used(place: Path) -> None:
    arguments = ["checkpoint=runs/lstm", "mix=[runs/kn]", "weights=[0.5,0.5]"]
    for kind in ("unigram", "continuous"):
        done = run_command(
            place, "evaluate.py", *arguments, f"cache={kind}", f"out=runs/{kind}", "json=one.json", "cache_size=20"
        )
        assert "best" in done.stdout and f"with cache={kind}" in done.stdout
        found = json.loads((place / "one.json").read_text())
        assert found["cache"]["kind"] == kind and found["cache"]["size"] == 20
        expected = {split: figures["perplexity"] for split, figures in found["splits"].items()}
        assert perplexities(place, f"checkpoint=runs/{kind}") == pytest.approx(expected, rel=1e-6)
    fixed = ["cache=unigram", "cache_size=9", "cache_decay=0.9", "cache_weight=0.2", "cache_boundary='</s>'"]
    assert run_command(place, "lm/generate.py", *arguments, *fixed, "max_words=5").stdout.strip()
    assert run_command(place, "evaluate.py", *arguments, *fixed, "mode=topk", "prompt=w000001").stdout.strip()


def test_errors_exit_with_status_two(place: Path) -> None:
    run_command(
        place, "lm/ngram/__main__.py", "data=zipf", "data.vocab_size=31", "data.tokens=1000", "run_dir=runs/other"
    )
    for arguments, message in [
        ([*COUNT, "out=absent/x.arpa"], "out=absent/x.arpa cannot be written"),
        ([*COUNT, "arpa=absent"], "arpa=absent cannot be read"),
        ([*COUNT, "run_dir=runs/lstm"], "runs/lstm already holds a run"),
        (["evaluate.py", "checkpoint=runs/kn", "mix=[runs/other]"], "Mixed models must have the same vocab"),
        (["evaluate.py", "checkpoint=runs/kn", "mix=[runs/none]"], "runs/none does not exist"),
        (["evaluate.py", "checkpoint=runs/kn", "cache=continuous"], "cache=continuous "),
        (["evaluate.py", "checkpoint=runs/kn", "cache=unigram", "cache_boundary=zebra"], "cache_boundary must"),
    ]:  # fmt: skip
        done = run_command(place, *arguments, check=2)
        assert message in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_bad_inputs_print_one_paragraph_and_leave_no_files(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arpa = (place / "kn.arpa").read_text()
    for name, text in {
        "empty": "",
        "cut": arpa[: len(arpa) // 2],
        "no_unk": re.sub(r"(?m)^\S+\t(<unk>|w000009)\t.*\n", "", arpa).replace("ngram 1=33", "ngram 1=31"),
        "huge": "\\data\\\nngram 1=33\nngram 2=999999999999\n\n",
        "text": "once upon a time\n",
    }.items():
        (place / f"{name}.arpa").write_text(text)
    (place / "bytes.arpa").write_bytes(b"\x1f\x8b" + bytes(50))
    before = sorted(place.rglob("*"))
    for arguments, message in [
        (["arpa=empty.arpa"], "\\data\\ is missing"),
        (["arpa=text.arpa"], "\\data\\ is missing"),
        (["arpa=cut.arpa", "out=x.arpa"], "arpa=cut.arpa, line "),
        (["arpa=no_unk.arpa"], "the file must have </s>, and <unk>"),
        (["arpa=huge.arpa"], "Try a pruned file."),
        (["arpa=bytes.arpa", "prune=1e-7"], "arpa=bytes.arpa cannot be read"),
        (["arpa=runs"], "arpa=runs cannot be read"),
        (["out=runs"], "out=runs cannot be written"),  # the same run can be repeated
    ]:
        done = run_command(place, COUNT[0], *DATA, *arguments, "run_dir=runs/bad", check=2)
        assert message in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
        left = [path for path in sorted(place.rglob("*")) if path not in before]
        assert not [path for path in left if path.suffix in (".arpa", ".pt") or path.name == "summary.json"]
    monkeypatch.setattr("lm.ngram.trie.free_memory", lambda _: 1000)
    done = run_command(place, *COUNT, "run_dir=runs/bad", check=2)
    less = run_command(place, COUNT[0], *DATA, "features=skip5", "run_dir=runs/bad", check=2)
    assert "features=skip5 needs about" in less.stderr and "Try features=ngram5, or less text." in less.stderr
    assert "Try KenLM: lmplz -o 3 --limit_vocab_file WORDS < TEXT > FILE, then arpa=FILE." in done.stderr


def test_pruned_run_is_smaller(place: Path) -> None:
    done = run_command(place, *COUNT, "prune=1e-4", "run_dir=runs/pruned", "out=pruned.arpa")
    summary, whole = (json.loads((place / f"runs/{name}/summary.json").read_text()) for name in ("pruned", "kn"))
    assert f"Pruned {whole['parameters']:,} n-grams to {summary['parameters']:,}" in done.stdout
    assert summary["parameters"] < whole["parameters"]
    assert (place / "pruned.arpa").stat().st_size < (place / "kn.arpa").stat().st_size


def test_damaged_ngrams_raise(place: Path, tmp_path: Path) -> None:
    content = torch.load(place / "runs/kn/checkpoints/last.pt", weights_only=True)
    content["model"]["children"][40] = 10**8
    torch.save(content, tmp_path / "far.pt")
    content["model"]["log_probs"] = content["model"]["log_probs"][:-1]
    content["model"]["children"][40] = content["model"]["children"][39]
    torch.save(content, tmp_path / "short.pt")
    del content["model"]["words"]
    torch.save(content, tmp_path / "none.pt")
    for name in ("far", "short", "none"):
        with pytest.raises(UserError, match=r"\.pt is damaged"):
            lm.load(tmp_path / f"{name}.pt")


def test_interrupted_run_is_repeated(place: Path) -> None:
    """As if killed at its very end, and as if killed before the checkpoint."""
    run = [*COUNT, "run_dir=runs/again", "out=again.arpa"]
    run_command(place, *run)
    paths = [place / "runs/again/checkpoints/last.pt", place / "again.arpa", place / "runs/again/summary.json"]
    contents = [path.read_bytes() for path in paths]
    for missing in (1, 2, 3):
        for path in paths[-missing:]:
            path.unlink()
        run_command(place, *run)
        assert [path.read_bytes() for path in paths[:2]] == contents[:2]
