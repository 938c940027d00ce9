"""Too little memory is one paragraph that names what to lower; what was saved is kept."""

import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lm.runs.shortage
from lm.config.schema import TrainConfig
from lm.data.opening import open_corpus
from lm.output.base import OutputLayer
from lm.output.layers.full import FullSoftmax
from lm.runs.memory_estimate import training_needs
from lm.runs.shortage import explain_oom, training_advice
from lm.system.errors import UserError, is_shortage
from lm.training.trainer import Trainer
from tests.conftest import TINY, Command
from tests.helpers.forks import Fork, train

Tiny = Callable[..., TrainConfig]
MIB = 1 << 20


@pytest.mark.parametrize("size", ["model.hidden_size=10000000", "model.embedding_size=10000000000000000"])
def test_absurd_sizes_are_told_before_anything_is_allocated(command: Command, workspace: Path, size: str) -> None:
    done = command("train.py", *TINY, size, check=2)
    key, _, value = size.partition("=")
    said = (
        size,
        "These settings need about",
        f"{key} must be a whole number, at least 1 and at most 1e+09; got {value}",
    )
    assert any(text in done.stderr for text in said)
    assert "Try model" in done.stderr or "model.hidden_size=" in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not (workspace / "runs").exists()


@pytest.mark.parametrize(
    ("settings", "share", "expected"),
    [
        (["trainer.batch_size=64", "trainer.bptt=40", "model.hidden_size=96"], 0.6, "trainer.micro_batches="),
        (["trainer.batch_size=64", "trainer.bptt=40", "output.fused=false"], 0.6, "output.fused=true"),
        (["trainer.batch_size=1", "model.embedding_size=2", "model.hidden_size=512"], 0.8, "output=adaptive"),
        (["trainer.batch_size=1", "model.hidden_size=512"], 0.2, "model.hidden_size="),
        (["model.maxent.order=3", "model.maxent.size=4194304"], 0.3, "model.maxent.size=524288"),
    ],
)
def test_the_advice_fits_into_what_is_free(
    tiny: Tiny, settings: list[str], share: float, expected: str, workspace: Path
) -> None:
    settings = ["data.vocab_size=3000", "data.tokens=20000", *settings]
    config = tiny(*settings)
    vocabulary = open_corpus(config.data, notice=lambda _: None).vocabulary
    free = int(share * training_needs(config, vocabulary).total)
    advice = training_advice(config, vocabulary, free=free)
    assert expected in advice
    changes = advice.removeprefix("Try ").split(",")[0].split()
    assert training_needs(tiny(*settings, *changes), vocabulary).total < free
    assert not list(workspace.glob("run*"))


def raise_shortage(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_a_shortage_in_training_names_what_to_lower_and_keeps_the_checkpoint(
    command: Command, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_step = Trainer.train_step

    def step(trainer: Trainer, batch: object) -> None:
        if trainer.progress.step == 25:
            raise_shortage()
        train_step(trainer, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "train_step", step)
    done = command("train.py", *TINY, "run_dir=run", "trainer.save_every_steps=10", check=2)
    assert done.stderr.startswith(
        "Out of memory on cpu while building or training the model. Try trainer.micro_batches="
    )
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1
    kept = torch.load(workspace / "run/checkpoints/last.pt", weights_only=True)
    assert kept["progress"]["step"] == 20


def test_a_shortage_in_evaluation_names_its_batch_size(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    command("train.py", *TINY, "run_dir=run", "evaluate.batch_size=3")
    monkeypatch.setattr(FullSoftmax, "nll", raise_shortage)
    more = ["trainer.max_steps=80", "evaluate.batch_size=9"]
    for arguments in (["train.py", "resume=run", *more], ["evaluate.py", "checkpoint=run", "evaluate.batch_size=9"]):
        done = command(*arguments, check=2)
        assert "while evaluating. Try evaluate.batch_size=2 instead of 9" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_a_shortage_while_a_checkpoint_is_loaded_is_not_called_damage(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("train.py", *TINY, "run_dir=run")
    monkeypatch.setattr(OutputLayer, "load_state_dict", raise_shortage)
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", raise_shortage)
    for arguments in (["train.py", "resume=run", "trainer.max_steps=80"], ["evaluate.py", "checkpoint=run"]):
        done = command(*arguments, check=2)
        assert "Out of memory on cpu" in done.stderr and "damaged" not in done.stderr


def train_with_little_memory() -> None:
    lm.runs.shortage.free_memory = lambda device: None  # type: ignore[assignment]  # noqa: ARG005, so that it is tried
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 400 * MIB, -1))
    train(*TINY, "model.hidden_size=4000", "run_dir=run")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a limit on address space")
def test_memory_that_really_runs_out_is_told(workspace: Path) -> None:
    child = Fork(train_with_little_memory, folder=workspace)
    assert child.wait() == 2, child.err
    assert child.err.startswith("Out of memory on cpu while building or training the model. Try model.hidden_size=")


def test_other_errors_pass_as_they_are() -> None:
    assert not is_shortage(RuntimeError("shapes do not match")) and not is_shortage(ValueError("out of memory"))
    assert is_shortage(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 4 bytes"))
    assert is_shortage(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    cpu = torch.device("cpu")
    with pytest.raises(RuntimeError, match="shapes"), explain_oom(cpu, doing="it", advice=lambda: ""):
        raise RuntimeError("shapes do not match")
    told = r"Out of memory on cpu while counting\. Count less\. What was saved before is kept\."
    with pytest.raises(UserError, match=told), explain_oom(cpu, doing="counting", advice=lambda: "Count less."):
        raise MemoryError
