"""Exact resume: a run killed repeatedly ends with the same bits as an uninterrupted one."""

import json
import os
import pty
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.data.corpus import Corpus
from lm.inference.open_model import open_model
from lm.system import checkpoint
from lm.system.errors import UserError
from lm.training.metrics import read_metrics
from tests.conftest import ROOT, TINY, run_command, without_times
from tests.helpers.forks import Fork, train

LIMITS = [f"trainer.{text}" for text in ("max_steps=200", "eval_every_steps=50", "save_every_steps=3")]
SETTINGS = [*TINY, *LIMITS, "optim.weight_decay=1e-4", "optim.schedule=cosine", "optim.warmup_steps=20"]
BY_VALIDATION = [
    *[*TINY, *LIMITS],
    *["optim=adam", "optim.lr=0.05", "optim.schedule=plateau", "trainer.patience=3", "trainer.average=0.9"],
    *["data.tokens=1000", "trainer.max_steps=5000", "trainer.save_every_steps=5", "trainer.log_every_steps=5"],
    "trainer.eval_every_steps=10",
]
"""A run with EMA whose schedule and early stopping depend on validation perplexity."""


def start(workspace: Path, run: str, settings: list[str]) -> Fork:
    return Fork(train, *settings, f"run_dir={run}", "resume=auto", folder=workspace)


def checkpoint_of(workspace: Path, run: str, name: str) -> dict[str, Any]:
    return torch.load(workspace / run / "checkpoints" / name, weights_only=True)  # type: ignore[no-any-return]


def progress(workspace: Path, run: str) -> int:
    path = workspace / run / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def wait_for(condition: Callable[[], bool], child: "Fork | subprocess.Popen[str]", *, every: float = 0.02) -> bool:
    """Poll until the condition holds; False if the child ended first."""
    while not condition():
        if child.poll() is not None:
            return False
        time.sleep(every)
    return True


def interrupt(
    workspace: Path, run: str, number: signal.Signals, *, settings: list[str], while_saving: bool = False
) -> bool:
    """Start or resume a run, then send the signal at a random time; False if the run ended first."""
    child = start(workspace, run, settings)
    wanted = progress(workspace, run) + random.randint(1, 8)
    reached = wait_for(lambda: progress(workspace, run) >= wanted, child)
    if while_saving:
        partial = workspace / run / "checkpoints" / ".last.pt.partial"
        reached = reached and wait_for(partial.exists, child, every=0.0005)
    else:
        time.sleep(random.uniform(0, 0.03))
    child.send_signal(number)
    code = child.wait()
    if code == 0:
        return False
    assert code == (-9 if number == signal.SIGKILL else 128 + number), child.err
    if number != signal.SIGKILL:
        assert "Stopped and saved at step" in child.out
    return reached


def assert_same(one: Any, other: Any, place: str = "") -> None:
    """Assert that two runs are bit-identical except for times."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), place
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            if not str(key).endswith(("_seconds", "_at", "metrics_position", "run_dir")):
                assert_same(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list | tuple):
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{place}[{i}]")
    else:
        assert one == other, place


def run_both(
    workspace: Path, interruptions: list[tuple[signal.Signals, bool]], *, settings: list[str] = SETTINGS
) -> None:
    run_command(workspace, "train.py", *settings, "run_dir=whole", "resume=auto")
    happened = [
        interrupt(workspace, "broken", number, settings=settings, while_saving=saving)
        for number, saving in interruptions
    ]
    assert sum(happened) >= 2, "the run ended before it could be interrupted; make it longer"
    child = start(workspace, "broken", settings)
    assert child.wait() == 0, child.err
    for name in ("last.pt", "best.pt"):
        assert_same(checkpoint_of(workspace, "whole", name), checkpoint_of(workspace, "broken", name))
    assert_same(
        [without_times(record) for record in read_metrics(workspace / "whole")],
        [without_times(record) for record in read_metrics(workspace / "broken")],
    )
    leftovers = [path.name for path in (workspace / "broken" / "checkpoints").iterdir()]
    assert sorted(leftovers) == ["best.pt", "last.pt"]


def test_killed_run_with_patience_resumes_bit_identical(workspace: Path) -> None:
    run_both(workspace, [(signal.SIGTERM, False), (signal.SIGKILL, True)], settings=BY_VALIDATION)
    records = read_metrics(workspace / "whole")
    perplexities = [record["valid/ppl"] for record in records if "valid/ppl" in record]
    assert min(perplexities) == perplexities[-4], "stopped after three evaluations without improvement"
    assert checkpoint_of(workspace, "whole", "last.pt")["progress"]["step"] < 5000
    rates = [record["optim/lr"] for record in records if "optim/lr" in record]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] <= 0.05 / 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_run_killed_many_times_resumes_bit_identical(workspace: Path, seed: int) -> None:
    random.seed(seed)
    kills = [(signal.SIGKILL, saving) for saving in (False, True, False, False, True)]
    run_both(workspace, [*kills, (signal.SIGINT, False)])


@pytest.mark.slow
def test_killed_run_on_lines_resumes_bit_identical(workspace: Path) -> None:
    """Lines of 0 to 14 words in steps of at most 5 tokens, so most kills fall between the steps of a batch."""
    generator = random.Random(1)
    for split, number in {"train": 400, "valid": 40, "test": 40}.items():
        lines = (" ".join(f"w{generator.randrange(20)}" for _ in range(generator.randrange(15))) for _ in range(number))
        (workspace / f"{split}.txt").write_text("".join(f"{line}\n" for line in lines))
    data = ["data=text", "data.dir=.", "data.sequences=lines", *SETTINGS[3:]]
    kills = [(signal.SIGKILL, False), (signal.SIGKILL, True), (signal.SIGKILL, False)]
    run_both(workspace, kills, settings=[*data, "trainer.max_steps=300", "trainer.log_every_steps=1"])


def files_of(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "damage",
    [
        {"loss_sum": torch.zeros(3)},
        {"progress": {"step": 20, "unheard_of": 1}},
        {"progress": {"step": "abc"}},
        {"progress": {"step": -5}},
        {"corpus": None},
        {"metrics_position": 17},
        {"metrics_position": -1},
        {"clusters": {"cutoffs": 7}},
        {"state": []},
        {"model": {}},
        {"model": None},
    ],
    ids=str,
)
def test_rejected_checkpoint_leaves_run_unchanged(workspace: Path, tiny_run: Path, damage: dict[str, Any]) -> None:
    shutil.copytree(tiny_run.parent, workspace, dirs_exist_ok=True)
    other = workspace / "run/checkpoints/other.pt"
    torch.save(checkpoint_of(workspace, "run", "best.pt") | damage, other)
    before = files_of(workspace / "run")
    done = run_command(workspace, "train.py", f"resume={other}", "trainer.max_steps=60", check=2)
    assert ("metrics.jsonl" if "metrics_position" in damage else "other.pt") in done.stderr
    after = files_of(workspace / "run")
    assert {name for name in after if after[name] != before.get(name)} <= {".lock"}
    assert after.keys() == before.keys()


def test_resume_when_best_is_last(workspace: Path, tiny_run: Path) -> None:
    shutil.copytree(tiny_run.parent, workspace, dirs_exist_ok=True)
    last, best = (workspace / "run/checkpoints" / name for name in ("last.pt", "best.pt"))
    best.unlink()
    best.hardlink_to(last)
    run_command(workspace, "train.py", f"resume={best}", "trainer.max_steps=60")
    assert sorted(path.name for path in best.parent.iterdir()) == ["best.pt", "last.pt"]
    assert checkpoint_of(workspace, "run", "last.pt")["progress"]["step"] == 60


@pytest.mark.slow
def test_sighup_saves(workspace: Path) -> None:
    """After the terminal closes, neither the progress bar nor messages can be written."""
    child, terminal = pty.fork()
    if child == 0:  # pragma: no cover
        os.chdir(workspace)
        endless = ["trainer.max_steps=1000000", "trainer.save_every_steps=null"]
        os.execv(sys.executable, [sys.executable, str(ROOT / "train.py"), *SETTINGS, "run_dir=run", *endless])
    while progress(workspace, "run") < 3:
        os.read(terminal, 1 << 16)
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP
    saved = checkpoint_of(workspace, "run", "last.pt")["progress"]["step"]
    assert saved >= read_metrics(workspace / "run")[-1]["step"] > 0


@pytest.mark.slow
def test_second_ctrl_c_quits_immediately(workspace: Path) -> None:
    endless = ["trainer.max_steps=1000000", "trainer.save_every_steps=null"]
    arguments = [sys.executable, str(ROOT / "train.py"), *SETTINGS, "run_dir=run", *endless]
    child = subprocess.Popen(arguments, cwd=workspace, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_for(lambda: progress(workspace, "run") >= 1, child)
    child.send_signal(signal.SIGSTOP)  # both signals are pending when it wakes up, as in a hanging run
    child.send_signal(signal.SIGINT)
    child.send_signal(signal.SIGTERM)
    child.send_signal(signal.SIGCONT)
    output, _ = child.communicate(timeout=60)
    assert child.returncode in (130, 143)
    assert "Stopped and saved" not in output


# ---- flipped bytes ---------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tiny_run: Path) -> Path:
    """The folder of a run and its corpus."""
    return tiny_run.parent


def flips(path: Path, number: int) -> Iterator[tuple[int, int]]:
    """Draw positions and bits to flip; half of them are in the archive's directory at the end of the file."""
    chance, size = random.Random(number), path.stat().st_size
    for i in range(number):
        yield (chance.randrange(size) if i % 2 else chance.randrange(size * 3 // 4, size)), chance.randrange(8)


def flip(path: Path, place: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def test_flipped_checkpoint_bytes(place: Path, tmp_path: Path) -> None:
    whole, bad = place / "run/checkpoints/last.pt", tmp_path / "bad.pt"
    good, noticed = checkpoint.load(whole), 0
    for where, bit in flips(whole, 40):
        shutil.copyfile(whole, bad)
        flip(bad, where, bit)
        try:
            found = checkpoint.load(bad)
        except UserError as error:
            noticed += 1
            assert str(bad) in str(error) and "\n" not in str(error)
        else:
            assert_same(found, good, f"bit {bit} of byte {where}")
    assert noticed > 10


def test_damaged_tensors_are_named(place: Path, tmp_path: Path) -> None:
    """A changed weight in last.pt or best.pt is one sentence; `verify=false` skips the check."""
    shutil.copytree(place / "run", tmp_path / "run")
    for name in ("last", "best"):
        file = tmp_path / f"run/checkpoints/{name}.pt"
        weight = next(iter(checkpoint.load(file)["model"].values())).numpy().tobytes()
        flip(file, file.read_bytes().index(weight) + 5, 3)
        command = ["evaluate.py", f"checkpoint={tmp_path / 'run'}", f"which={name}", f"json={tmp_path}/x.json"]
        damaged = run_command(place, *command, check=2)
        assert f"{name}.pt cannot be read as a checkpoint (checksum mismatch" in damaged.stderr
        done = run_command(place, *command, "verify=false")
        assert "perplexity" in done.stdout


def test_flipped_corpus_bytes(place: Path, tmp_path: Path) -> None:
    (meta,) = (place / "data").glob("*/meta.json")
    whole = meta.parent
    good, noticed = Corpus.open(whole), 0
    chance = random.Random(1)
    files = sorted(path.name for path in whole.iterdir())
    for number in range(20):
        bad = tmp_path / str(number)
        shutil.copytree(whole, bad)
        file = bad / files[number % len(files)]
        flip(file, chance.randrange(file.stat().st_size), chance.randrange(8))
        try:
            found = Corpus.open(bad)
            texts = {split: found.text(split) for split in ("train", "valid", "test")}
        except UserError as error:
            noticed += 1
            assert str(bad) in str(error)
        else:
            assert found.vocabulary.hash == good.vocabulary.hash
            assert {**found.meta, "checksum": 0} == {**good.meta, "checksum": 0}
            assert all((texts[split].tokens == good.split(split)).all() for split in texts)
    assert noticed >= 15
    flip(tmp_path / "0" / "train.bin", 7, 0)
    Corpus.open(tmp_path / "1", verify=False).split("test")


def test_changed_vocabulary_with_valid_checksum_raises(place: Path, tmp_path: Path) -> None:
    content = checkpoint.load(place / "run/checkpoints/last.pt")
    words = content["vocabulary"]["files"]["vocab.tsv"].clone()
    words[words.tolist().index(ord("w"))] = ord("v")
    content["vocabulary"]["files"]["vocab.tsv"] = words
    del content["format"]
    checkpoint.save(content, tmp_path / "changed.pt")
    with pytest.raises(UserError, match="vocabulary hash mismatch"):
        open_model(str(tmp_path / "changed.pt"), device="cpu")


@pytest.mark.parametrize("key", ["root", "url"])
def test_checkpoint_cannot_redirect_writes_or_downloads(place: Path, tmp_path: Path, key: str) -> None:
    content = checkpoint.load(place / "run/checkpoints/last.pt")
    elsewhere = tmp_path / "elsewhere"
    if key == "root":
        data = {**content["config"]["data"], "root": str(elsewhere)}
    else:
        data = {"name": "text8", "root": "data", "min_count": 11, "url": "http://127.0.0.1:9/x.zip"}
    content = {**content, "config": {**content["config"], "data": data}}
    del content["format"]
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    checkpoint.save(content, tmp_path / "run/checkpoints/last.pt")
    for command in (["evaluate.py", "checkpoint=run"], ["train.py", "resume=run", "trainer.max_steps=50"]):
        done = run_command(tmp_path, *command, check=2)
        assert "a checkpoint must not choose where to write or what to download" in done.stderr
    assert not elsewhere.exists() and not (tmp_path / "data").exists()
    assert json.dumps(data) in json.dumps(checkpoint.load(tmp_path / "run/checkpoints/last.pt")["config"])
