"""evaluate.py and lm.load: perplexities match the run's; other texts; checkpoints."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lm
from lm.config.inference import EvaluateConfig as CommandConfig
from lm.config.inference import ScoringOverrides, TextFolderConfig
from lm.data.text.vocabulary import EOS, UNK
from lm.inference.evaluate import evaluate
from lm.inference.open_model import open_model
from lm.system.errors import UserError
from tests.conftest import TINY, Command, run_command


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run shared by all tests in this file."""
    folder = tmp_path_factory.mktemp("evaluated")
    run_command(folder, "train.py", *TINY, "run_dir=run", "optim.weight_decay=1e-4")
    return folder / "run"


@pytest.fixture
def score(run: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, dict[str, float]]]:
    """Run the evaluation and read its JSON output."""
    monkeypatch.chdir(run.parent)

    def make(**changes: object) -> dict[str, dict[str, float]]:
        values: dict[str, Any] = {"checkpoint": "run", "evaluate": ScoringOverrides(batch_size=2), "device": "cpu"}
        evaluate(CommandConfig(**values | changes))
        written = max(Path("run").glob("evaluation*.json"), key=lambda path: path.stat().st_mtime_ns, default=None)
        target = Path(str(changes.get("json") or written))
        return json.loads(target.read_text())["splits"]  # type: ignore[no-any-return]

    return make


def test_perplexities_match_summary(run: Path, score) -> None:
    figures = score()
    summary = json.loads((run / "summary.json").read_text())
    assert figures["test"]["perplexity"] == pytest.approx(summary["test"]["last"], rel=1e-6)
    assert figures["valid"]["perplexity"] == pytest.approx(summary["valid"]["last"], rel=1e-6)
    assert figures["test"]["unigram_perplexity"] == pytest.approx(summary["test"]["unigram"], rel=1e-9)
    assert figures["test"]["tokens"] == 200
    assert figures["test"]["oov_rate"] == 0


def test_max_tokens_scores_the_first_tokens(run: Path, score, tmp_path: Path) -> None:
    whole, first = score(), score(evaluate=ScoringOverrides(streams=1, max_tokens=50))
    assert first["test"]["tokens"] == 50 and first["test"]["perplexity"] != whole["test"]["perplexity"]
    corpus = open_model("run", device="cpu").corpus(["test"])
    words = [corpus.vocabulary.words[i] for i in corpus.split("test")[:50]]
    assert len(words) == 50
    (tmp_path / "other").mkdir()
    (tmp_path / "other/test.txt").write_text(" ".join(words).replace(" </s> ", "\n").removesuffix(" </s>") + "\n")
    by_hand = score(
        data=TextFolderConfig(str(tmp_path / "other")),
        splits=["test"],
        evaluate=ScoringOverrides(streams=1, max_tokens=50),
    )
    assert first["test"]["perplexity"] == pytest.approx(by_hand["test"]["perplexity"], rel=1e-6)
    assert (run / "evaluation-step-40-streams-1-first-50.json").exists(), "not under the name of the whole"
    beyond = score(evaluate=ScoringOverrides(max_tokens=10**6))
    assert beyond["test"]["perplexity"] == pytest.approx(whole["test"]["perplexity"], rel=1e-6)


def test_training_scores_the_first_tokens_and_says_so(command: Command, workspace: Path) -> None:
    out = command("train.py", *TINY, "evaluate.max_tokens=50", "run_dir=run").stdout
    assert re.search(r"valid ppl [\d.]+ on the first 50 tokens", out)
    assert "Scored as 3 streams on the first 50 tokens." in out
    summary = json.loads((workspace / "run/summary.json").read_text())
    command("evaluate.py", "checkpoint=run", "evaluate.max_tokens=50", "json=first.json")
    splits = json.loads((workspace / "first.json").read_text())["splits"]
    assert splits["test"]["perplexity"] == pytest.approx(summary["test"]["last"], rel=1e-6)
    unigram = splits["test"]["unigram_perplexity"]
    assert summary["test"]["unigram"] == pytest.approx(unigram, rel=1e-9), "of the same tokens"
    assert f"(unigram: {unigram:.2f})" in out
    error = command("train.py", "resume=run", "trainer.max_steps=60", "evaluate.max_tokens=60", check=2).stderr
    assert "evaluate.max_tokens" in error, "part of the definition of the perplexity"


def test_other_text_uses_the_runs_vocabulary(run: Path, score, tmp_path: Path) -> None:
    loaded = lm.load(run)
    model, vocabulary = loaded.model, loaded.vocabulary
    (tmp_path / "test.txt").write_text(
        f"{vocabulary.words[0]} {vocabulary.words[3]} nonsense\n\n{vocabulary.words[1]}\n"
    )
    figures = score(data=TextFolderConfig(str(tmp_path)), splits=["valid", "test"], json=str(tmp_path / "out.json"))
    assert list(figures) == ["test"]
    words = [vocabulary.words[0], vocabulary.words[3], UNK, EOS, vocabulary.words[1], EOS]
    ids = vocabulary.encode(words)
    inputs = torch.tensor([[vocabulary.eos_id], *([i] for i in ids[:-1])])
    # Six tokens in three spans, each warmed up on all previous tokens: the plain chain rule.
    with torch.no_grad():
        hidden, _ = model(inputs, model.initial_state(1))
        nll = -model.output.log_prob(hidden)[torch.arange(6), 0, torch.from_numpy(np.asarray(ids))]
    assert figures["test"]["perplexity"] == pytest.approx(float(nll.mean().exp()), rel=1e-5)
    assert figures["test"]["oov_rate"] == pytest.approx(1 / 6)


def test_load_applies_pending_decay(run: Path) -> None:
    """A run stopped between evaluations saves rows with pending decay."""
    content = torch.load(run / "checkpoints/last.pt", weights_only=True)
    state = content["optimizer"]["tables"]["input"]
    assert int(state["decayed"].min()) == 40, "the last checkpoint follows an evaluation, which applies decay"
    state["decayed"].fill_(30)
    torch.save(content, run.parent / "owing.pt")
    model = lm.load(run.parent / "owing.pt").model
    rate = 1 - 0.1 * 1e-4 / state["accumulator"].double().sqrt()
    expected = content["model"]["input.weight"].double() * rate**10
    torch.testing.assert_close(model.input.weight.double(), expected, rtol=1e-5, atol=1e-7)


def test_mistakes_raise(score, tmp_path: Path) -> None:
    for changes, message in [
        ({"data": TextFolderConfig(str(tmp_path))}, "valid.txt, test.txt"),
        ({"json": "/dev/null/x.json"}, "json=/dev/null/x.json cannot be written"),
        ({"device": "cuda"}, "is not available"),
    ]:
        with pytest.raises(UserError, match=message):
            score(**changes)


def test_last_and_best_checkpoint(workspace: Path) -> None:
    """The learning rate is so high that the last weights are not the best."""
    settings = ["seed=2", "model.dropout=0", "optim.lr=1", "optim.max_grad_norm=null", "trainer.eval_every_steps=10"]
    run_command(workspace, "train.py", *TINY, *settings, "run_dir=run")
    summary = json.loads((workspace / "run/summary.json").read_text())
    best, end = summary["best_step"], 40
    assert best < end, "this test needs a run that was better before its end"
    last = run_command(workspace, "evaluate.py", "checkpoint=run")
    assert f"run: using last.pt (step 40); pass which=best for best.pt (step {best})." in last.stdout
    chosen = run_command(workspace, "evaluate.py", "checkpoint=run", "which=best")
    assert f"run: using best.pt (step {best})." in chosen.stdout
    assert "seen 10 to 99 times" in chosen.stdout
    files = {path.name: json.loads(path.read_text()) for path in (workspace / "run").glob("evaluation*.json")}
    assert set(files) == {"evaluation-step-40.json", f"evaluation-best-step-{best}.json"}
    for name, which in {"evaluation-step-40.json": "last", f"evaluation-best-step-{best}.json": "best"}.items():
        assert files[name]["splits"]["test"]["perplexity"] == pytest.approx(summary["test"][which], rel=1e-6)


def test_other_results_are_not_overwritten(run: Path, tmp_path: Path) -> None:
    """Other streams, splits and texts get separate files, even for folders with the same name."""
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    for file in copied.glob("evaluation*.json"):
        file.unlink()
    for name, text in {"a": "w000001 w000002\n", "b": "w000003\n"}.items():
        (tmp_path / name / "text").mkdir(parents=True)
        (tmp_path / name / "text/test.txt").write_text(text * 5)
    asked: list[list[str]] = [[], [], ["evaluate.streams=2"], ["splits=[test]"]]
    asked += [[f"data.dir={tmp_path / name / 'text'}"] for name in ("a", "b", "b")]
    for words in asked:
        run_command(run.parent, "evaluate.py", f"checkpoint={copied}", *words)
    names = sorted(path.name.removeprefix("evaluation-step-40") for path in copied.glob("evaluation*.json"))
    assert names == sorted([".json", "-streams-2.json", "-test.json", "-text.json", "-text-2.json"])


@pytest.mark.slow
def test_plain_evaluation_imports_no_mixtures_caches_or_ngrams() -> None:
    code = "import sys, lm.inference.evaluate, lm.inference.generation; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    unused = ("lm.ngram", "lm.inference.mixture", "lm.inference.cache", "lm.inference.unnormalized", "lm.compare")
    assert not [name for name in modules if name.startswith(unused)]
