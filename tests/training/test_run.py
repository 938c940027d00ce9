"""Whole runs through the command line: results, files, resuming."""

import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lm.training.run
from lm.config.schema import TrainConfig
from lm.data.corpus import Corpus, open_corpus
from lm.system import checkpoint
from lm.system.ranks import Ranks
from lm.training.metrics import read_metrics
from lm.training.provenance import command_line
from lm.training.report import _further, _notes
from lm.training.setup import resolve_cutoffs
from lm.training.trainer import Trainer, TrainingProgress
from tests.conftest import ROOT, TINY, Command, run_command
from tests.helpers.forks import Fork, train
from tests.helpers.training import make_trainer


def test_training_approaches_true_perplexity(command: Command, workspace: Path) -> None:
    command(
        "train.py",
        *["experiment=zipf", "data.vocab_size=40", "data.tokens=150000", "trainer.max_epochs=2"],
        *["model.embedding_size=16", "model.hidden_size=32", "trainer.threads=1", "run_dir=run"],
        "output.cost_model=flops",
    )
    summary = json.loads((workspace / "run/summary.json").read_text())
    assert summary["test"]["last"] == pytest.approx(summary["true_perplexity"], rel=0.03)
    assert summary["true_perplexity"] < 0.5 * summary["test"]["unigram"]


@pytest.mark.slow
def test_default_run_learns(command: Command, workspace: Path) -> None:
    command("train.py", "run_dir=run")
    summary = json.loads((workspace / "run/summary.json").read_text())
    assert summary["test"]["last"] <= 0.7 * summary["test"]["unigram"]


def test_command_is_stored_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/bin/python3", "-m", "lm.ngram", "order=3", "mix=[a, b]"])
    assert command_line() == "python3 -m lm.ngram order=3 'mix=[a, b]'"


def test_run_writes_all_files(command: Command, workspace: Path) -> None:
    done = command("train.py", *TINY, "run_dir=run", "trainer.eval_every_steps=20")
    run = workspace / "run"
    files = {path.name for path in run.iterdir() if not path.name.startswith("events.out.")}
    settings = {"config.yaml", "overrides.yaml"}
    assert files == {".lock", "checkpoints", "metrics.jsonl", "run.json", "run.log", "summary.json", *settings}
    (start,) = json.loads((run / "run.json").read_text())["starts"]
    assert "hidden_size=12" in start["command"] and start["folder"] == str(workspace)
    assert start["versions"]["torch"] == torch.__version__
    assert re.fullmatch("[0-9a-f]{40}\\+?", start["commit"] or "0" * 40)
    assert (start["ranks"], start["threads"], start["host"]) == (1, 1, platform.node())
    assert start["device"].startswith("cpu")
    assert OmegaConf.load(run / "config.yaml").model.hidden_size == 12
    records = read_metrics(run)
    events = EventAccumulator(str(run))
    events.Reload()
    assert " ".join(sorted(events.Tags()["scalars"])) == (
        "1_valid/loss 1_valid/ppl 1_valid/ppl_by_training_second 1_valid/ppl_without_unk 2_test/loss 2_test/ppl "
        "3_train/loss 3_train/ppl 4_speed/step_ms 4_speed/tokens_per_s 5_optim/grad_norm 5_optim/lr 7_memory/peak_gib"
    )
    assert [tag for tag in events.Tags()["tensors"] if not tag.startswith("_")] == ["custom_scalars__config__"]
    valid = [(e.step, e.value) for e in events.Scalars("1_valid/ppl")]
    assert valid == [(r["step"], pytest.approx(r["valid/ppl"])) for r in records if "valid/ppl" in r]

    summary = json.loads((run / "summary.json").read_text())
    for figure in [summary["test"]["last"], summary["valid"]["best"], summary["test"]["unigram"]]:
        assert f"{figure:.2f}" in done.stdout
    assert re.search(r"^epoch 0.20  step 20  valid ppl \d+", done.stdout, re.M), "plain lines without a terminal"
    for next_command in ["tensorboard.main --logdir", "evaluate.py checkpoint=run", "train.py resume=run"]:
        assert next_command in done.stdout


@pytest.mark.slow
def test_training_imports_no_torch_compiler(workspace: Path) -> None:
    """Importing it takes as long as importing torch."""
    code = f"""
import runpy, sys
sys.modules["torch._dynamo"] = None  # makes every import of it fail
sys.argv = {["train.py", *TINY, "trainer.max_steps=3"]}
runpy.run_path({str(ROOT / "train.py")!r}, run_name="__main__")
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=workspace, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_best_differs_from_last_when_training_gets_worse(command: Command, workspace: Path) -> None:
    memorized = ["data.tokens=1000", "model.hidden_size=64", "model.dropout=0", "optim.lr=0.2", "trainer.max_steps=200"]
    command("train.py", *TINY, "run_dir=run", *memorized)
    best = torch.load(workspace / "run/checkpoints/best.pt", weights_only=True)
    last = torch.load(workspace / "run/checkpoints/last.pt", weights_only=True)
    evaluations = {r["step"]: r["valid/ppl"] for r in read_metrics(workspace / "run") if "valid/ppl" in r}
    assert last["progress"]["step"] == 200
    assert best["progress"]["step"] == min(evaluations, key=lambda step: evaluations[step]) != 200
    summary = json.loads((workspace / "run/summary.json").read_text())
    assert summary["valid"]["best"] == pytest.approx(min(evaluations.values()))
    assert summary["test"]["best"] != summary["test"]["last"]


@pytest.mark.parametrize(
    ("best", "last", "key"), [(80, 120, "which=best (step 7,"), (110, 120, "optim.lr"), (80, 90, "")]
)
def test_note_names_the_cause_of_a_bad_perplexity(best: float, last: float, key: str) -> None:
    progress = TrainingProgress(best_step=7, best_perplexity=best, last_perplexity=last)
    notes = _notes(progress, {"valid": 100, "test": 100}, test=last)
    assert len(notes) == bool(key) and key in "".join(notes)


def test_suggested_commands_work(command: Command) -> None:
    done = command("train.py", *TINY, "run_dir=a run")
    assert done.stdout.splitlines()[-1].endswith("train.py 'resume=a run' trainer.max_steps=80")
    assert ", stopped at trainer.max_steps=40;" in done.stdout


def test_resume_from_best_checkpoint(command: Command, workspace: Path) -> None:
    command("train.py", *TINY, "run_dir=run", "trainer.eval_every_steps=10", "optim.lr=1", "optim.max_grad_norm=null")
    best = torch.load(workspace / "run/checkpoints/best.pt", weights_only=True)["progress"]["step"]
    done = command("train.py", "resume=run/checkpoints/best.pt")
    assert f"resumed  at step {best}" in done.stdout
    records = read_metrics(workspace / "run")
    logged = [record["step"] for record in records if "train/loss" in record]
    assert logged == list(range(7, 41, 7))


@pytest.mark.parametrize("way", ["trainer.precision=fp32", "trainer.precision=bf16 trainer.micro_batches=3"])
def test_finished_run_continues_with_higher_limit(command: Command, workspace: Path, way: str) -> None:
    """Training in two halves matches an uninterrupted run."""
    settings = [*TINY, "model.dropout=0.2", "trainer.eval_every_steps=40", *way.split()]
    command("train.py", *settings, "run_dir=whole", "trainer.max_steps=80")
    command("train.py", *settings, "run_dir=halves", "trainer.max_steps=40")
    done = command("train.py", "resume=halves", "trainer.max_steps=80")  # nothing else needs to be repeated
    assert "resumed  at step 40" in done.stdout
    whole, halves = (
        torch.load(workspace / name / "checkpoints/last.pt", weights_only=True) for name in ("whole", "halves")
    )
    assert all(torch.equal(whole["model"][name], halves["model"][name]) for name in whole["model"])
    again = command("train.py", "resume=halves")
    assert "Test perplexity" in again.stdout


def test_changed_settings_raise_on_resume(command: Command) -> None:
    command("train.py", *TINY, "run_dir=run")
    done = command("train.py", "resume=run", "optim.lr=0.3", "seed=9", "trainer.max_steps=80", check=2)
    assert "optim.lr: 0.1 in the run, 0.3 now" in done.stderr
    assert "seed: 1 in the run, 9 now" in done.stderr
    assert "max_steps" not in done.stderr
    done = command("train.py", "resume=run", "optim.schedule=linear", "trainer.max_steps=80", check=2)
    assert "optim.schedule=linear depends on trainer.max_steps." in done.stderr
    done = command("train.py", *TINY, "run_dir=run", "resume=auto", "model.hidden_size=13", check=2)
    assert "model.hidden_size: 12 in the run, 13 now" in done.stderr


def test_changed_corpus_raises(command: Command, workspace: Path) -> None:
    text = workspace / "text"
    text.mkdir()
    for split in ("train", "valid", "test"):
        (text / f"{split}.txt").write_text("a b c d\nb c d e\n" * 30)
    command("train.py", *_text_settings(), "run_dir=run")
    for change in ("b c d e\na b c d\n" * 30, "x y z\nz y x\n" * 40):  # the same words in another order, other words
        (text / "train.txt").write_text(change)
        for arguments in (["train.py", "resume=run"], ["evaluate.py", "checkpoint=run", "splits=[train]"]):
            done = command(*arguments, check=2)
            assert "the corpus has changed since" in done.stderr
            assert "Traceback" not in done.stderr


def test_damaged_test_split_raises_before_training(command: Command, workspace: Path) -> None:
    command("train.py", *TINY, "run_dir=first")
    (path,) = workspace.glob("data/*/test.bin")
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    assert "test.bin" in command("train.py", *TINY, "run_dir=second", check=2).stderr
    assert not (workspace / "second").exists()


def train_with_small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    train(*TINY, "run_dir=run", "trainer.max_steps=12")


def test_full_disk_is_reported_by_the_run(workspace: Path) -> None:
    """A failed save ends the run with exit code 2 and one paragraph; once there is space, the run can start over."""
    child = Fork(train_with_small_files, folder=workspace)
    assert child.wait() == 2, child.out + child.err
    assert "checkpoints/last.pt cannot be written" in child.err
    assert "Traceback" not in child.err
    assert not (workspace / "run/summary.json").exists()
    run_command(workspace, "train.py", *TINY, "run_dir=run", "resume=auto")


def _text_settings() -> list[str]:
    return ["data=text", "data.dir=text", *(setting for setting in TINY if not setting.startswith("data"))]


def test_unreadable_paths_raise(command: Command, workspace: Path) -> None:
    (workspace / "file").write_text("")
    for arguments, message in [
        (["data=text", "data.dir=nowhere"], "nowhere"),
        (["data=text", "data.dir=file"], "file"),
        ([*TINY, "run_dir=file/run"], "run_dir=file/run cannot be written: Not a directory"),
        ([*TINY, "data.root=file/data"], "Not a directory"),
        ([*TINY, "trainer.device=cuda:7"], "trainer.device=cuda:7 is not available"),
    ]:
        done = command("train.py", *arguments, check=2)
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def train_and_say_threads(*overrides: str) -> None:
    """Prints the threads of the last training step and of the last evaluation."""
    used: dict[str, int] = {}

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            used[name] = torch.get_num_threads()
            return call(*arguments, **options)

        return noted

    Trainer.step = noting("training", Trainer.step)  # type: ignore[method-assign]
    lm.training.run.score = noting("evaluation", lm.training.run.score)
    torch.set_num_threads(2)
    train(*overrides)
    print(json.dumps(used))


@pytest.mark.parametrize(("asked", "evaluation"), [("null", 2), ("1", 1)])
def test_small_steps_use_one_thread_evaluations_all(workspace: Path, asked: str, evaluation: int) -> None:
    child = Fork(train_and_say_threads, *TINY, "trainer.max_steps=3", f"trainer.threads={asked}", folder=workspace)
    assert child.wait() == 0, child.err
    assert json.loads(child.out.splitlines()[-1]) == {"training": 1, "evaluation": evaluation}


# ---- reports ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "steps", "further"),
    [
        ("trainer.max_steps=40", 40, "trainer.max_steps=80"),
        ("trainer.max_steps=30", 110, "trainer.max_steps=120"),
        ("trainer.max_steps=30", 60, "trainer.max_steps=120"),
        ("trainer.max_steps=null trainer.max_tokens=4000000", 200_000, "trainer.max_tokens=8000000"),
        ("trainer.max_steps=null trainer.max_epochs=5 optim.schedule=halve_after_half", 500, None),
        ("trainer.max_steps=40 optim.schedule=linear", 40, None),
    ],
)
def test_finished_run_suggests_how_to_continue(
    tiny: Callable[..., TrainConfig], limits: str, steps: int, further: str | None
) -> None:
    config = tiny(*limits.split())
    trainer, _ = make_trainer(config, open_corpus(config.data), num_batches=1)
    trainer.progress.step = steps
    assert _further(trainer) == further


# ---- Table 2 ---------------------------------------------------------------------------------------------------------


PRESETS = ["irnn", "feedforward", "lstm_2048_512", "char_cnn", "maxent"]
SMALLER = """data=zipf data.vocab_size=300 data.tokens=3000 model.hidden_size=64 model.embedding_size=32
    output.cost_model=flops trainer.batch_size=8 trainer.bptt=5 trainer.max_steps=3 optim.lr=0.001 trainer.threads=1
    run_dir=run""".split()  # noqa: SIM905
NARROWER = {
    "lstm_2048_512": ["model.projection=32"],
    "char_cnn": ["model.projection=32", "input.filters=[4,8]"],
    "maxent": ["model.maxent.size=100000"],
}


@pytest.mark.parametrize("preset", [pytest.param(name, marks=pytest.mark.slow) for name in PRESETS])
def test_preset_trains(preset: str, workspace: Path) -> None:
    settings = [f"experiment=one_billion_word_{preset}", *SMALLER, *NARROWER.get(preset, [])]
    if preset == "maxent":  # its layer has no clusters
        settings.remove("output.cost_model=flops")
    if preset == "char_cnn":
        shown = run_command(workspace, "train.py", *settings, "trainer.dry_run=true").stdout
        assert "hidden 5 x 8" in shown
    assert "Test perplexity" in run_command(workspace, "train.py", *settings).stdout


# ---- bad inputs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tiny_run: Path) -> Path:
    """The folder of a run and its corpus."""
    return tiny_run.parent


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("optim.lr=1e23", "Try optim.lr=0.1"),
        ("model.hidden_size=900000000", "more bytes than can be counted"),
        ("output=hsm_freq output.num_classes=99999", "output.num_classes must be from 1 to the vocabulary size (32)"),
        ("data.tokens=100000000000000", "data.tokens must be a whole number, at least 1000 and at most 1e+10"),
    ],
)
def test_extreme_settings_raise(place: Path, overrides: str, message: str) -> None:
    given = [word for word in TINY if not word.startswith("output")]
    done = run_command(place, "train.py", *given, *overrides.split(), check=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_blocks_are_timed_at_training_size(tiny: Callable[..., Any], place: Path) -> None:
    """Streams have 500 tokens, so larger `trainer.bptt` values are capped."""
    given = ("output=adaptive", "output.cost_model=flops", "data.tokens=2000")
    (meta,) = (place / "data").glob("*/meta.json")
    corpus = Corpus.open(meta.parent)
    parts: Any = {"device": torch.device("cpu"), "ranks": Ranks()}
    of = [resolve_cutoffs(tiny(*given, f"trainer.bptt={bptt}"), corpus, **parts)[1] for bptt in (500, 100_000)]
    assert of[0] == of[1]


@pytest.mark.parametrize("key", ["corpus", "progress", "vocabulary", "optimizer"])
def test_checkpoint_missing_a_key_raises(place: Path, tmp_path: Path, key: str) -> None:
    content = checkpoint.load(place / "run/checkpoints/last.pt")
    del content["format"]
    checkpoint.save({**content, key: None}, tmp_path / "bad.pt")
    done = run_command(place, "evaluate.py", f"checkpoint={tmp_path}/bad.pt", check=2)
    assert "bad.pt is damaged" in done.stderr


def not_finite(content: dict[str, Any]) -> None:
    content["model"] = {name: weight * torch.nan for name, weight in content["model"].items()}


def sparse(content: dict[str, Any]) -> None:
    content["model"] = {name: weight.to_sparse() for name, weight in content["model"].items()}


def far_ahead(content: dict[str, Any]) -> None:
    content["progress"]["step"] = 1 << 70


@pytest.mark.parametrize(
    ("damage", "message", "words"),
    [
        (not_finite, "must be finite; got NaN", ["lm/generate.py", "checkpoint=run"]),
        (sparse, "does not fit the settings it carries", ["evaluate.py", "checkpoint=run"]),
        (far_ahead, "is damaged", ["train.py", "resume=run", "trainer.max_steps=60"]),
    ],
)
def test_weights_and_steps_that_training_cannot_write_raise(
    place: Path, tmp_path: Path, damage: Callable[[dict[str, Any]], None], message: str, words: list[str]
) -> None:
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    content = torch.load(place / "run/checkpoints/last.pt", weights_only=True)
    damage(content)
    torch.save(content, tmp_path / "run/checkpoints/last.pt")
    assert message in run_command(tmp_path, *words, check=2).stderr
