"""Memory estimates match the tensors of real steps; out-of-memory errors are one paragraph with a fix."""

import re
import resource
import sys
from pathlib import Path

import pytest
import torch

import lm.training.memory_check
from lm.config.schema import TrainConfig
from lm.data.batches import BatchLoader, to_device
from lm.data.corpus import open_corpus
from lm.model.language_model import build_model
from lm.model.regularization import DropoutMasks
from lm.optim.optimizer import build_optimizer
from lm.output.base import OutputLayer
from lm.output.layers.full import FullSoftmax
from lm.system.errors import UserError, is_shortage
from lm.system.memory import Ledger, explain_oom
from lm.training.memory_check import MemoryCheck
from lm.training.setup import training_streams
from lm.training.step import ForwardBackward
from lm.training.trainer import Trainer
from tests.conftest import TINY, Command, Tiny
from tests.helpers.forks import Fork, train

MIB = 1 << 20
CPU = torch.device("cpu")
SIZED = ["data.vocab_size=3000", "data.tokens=20000", "model.embedding_size=48", "model.hidden_size=96"]
SIZED += ["trainer.batch_size=64", "trainer.bptt=20"]
WAYS = [
    "output=full",
    "output=full trainer.micro_batches=4",
    "output=full trainer.precision=bf16",
    "output=adaptive output.cutoffs=[300,1000] trainer.bptt=40 model.dropout=0.2",
    "output=adaptive output.cutoffs=[300,1000] input=adaptive",
    "output=hsm_freq optim.embedding=dense",
    "output=hsm_freq model.maxent.order=3 model.maxent.size=50000",
    "output=dsoftmax_star output.cutoffs=[300,1000] optim.embedding=rowwise",
    "output=full model.maxent.order=3 model.maxent.size=1000000",
    "output=full model.tie=true model.embedding_size=96",
    *(f"output={name}" for name in ("sampled", "blackout", "nce", "hsm_huffman")),
    *(f"output=full model={core}" for core in ("gru", "rnn", "scrn", "feedforward", "transformer model.memory=30")),
    *(f"output=full {way}" for way in ("model.projection=48", "input=char_cnn", "optim=adam")),
]


TIED = ["model.tie=true", "model.embedding_size=192"]


def check_of(config: TrainConfig, *, num_ranks: int = 1) -> MemoryCheck:
    corpus = open_corpus(config.data)
    return MemoryCheck(corpus.vocabulary, training_streams(config, corpus), CPU, num_ranks=num_ranks)


def peak_of_steps(config: TrainConfig, device: torch.device = CPU) -> int:
    """Return the peak bytes of building a model and training two steps."""
    corpus = open_corpus(config.data)
    with Ledger() as ledger:
        model = build_model(config, corpus.vocabulary).train().to(device)
        optimizer = build_optimizer(model, config.optim)
        gradient = ForwardBackward(model, precision=config.trainer.precision)
        options = {"seed": 1, "start": 0, "pin": False, "micro_batches": config.trainer.micro_batches}
        batches = BatchLoader(training_streams(config, corpus), model, **options)  # type: ignore[arg-type]
        batch = to_device(batches.make(0), device)
        for _ in range(2):
            num_streams = config.trainer.batch_size
            state = model.core.initial_state(num_streams, device=device)
            losses, _ = gradient(batch, state, DropoutMasks(1, 0, num_streams, slice(0, num_streams)))
            optimizer.step(losses[0], lr=0.1, num_steps=1)
    return ledger.peak


@pytest.mark.parametrize("way", [*WAYS[:3], *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[3:])])
def test_estimate_equals_the_peak_of_a_step(tiny: Tiny, way: str) -> None:
    config = tiny(*SIZED, *way.split())
    estimate = check_of(config).estimate(config)
    assert estimate.total == pytest.approx(peak_of_steps(config), rel=0.15), str(estimate)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS[:5])
def test_estimate_equals_the_peak_of_a_step_on_a_gpu(tiny: Tiny, way: str) -> None:
    """Uses sizes large enough that library allocations do not matter."""
    larger = ["data.vocab_size=50000", "model.embedding_size=256", "model.hidden_size=512", "data.tokens=400000"]
    config = tiny(*SIZED, *larger, *way.replace("[300,1000]", "[3000,10000]").split())
    check = MemoryCheck(check_of(config).vocabulary, check_of(config).streams, torch.device("cuda"))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    peak_of_steps(config, torch.device("cuda"))
    peak = torch.cuda.max_memory_allocated() - before
    assert check.estimate(config).total == pytest.approx(peak, rel=0.5)


def test_ranks_need_memory_for_fewer_streams(tiny: Tiny) -> None:
    config = tiny(*SIZED, "output=adaptive", "output.cutoffs=[300,1000]")
    alone, ranks = (check_of(config, num_ranks=number).estimate(config) for number in (1, 4))
    assert (ranks.parameters, ranks.optimizer) == (alone.parameters, alone.optimizer)
    assert ranks.step < alone.step


def test_small_models_are_not_measured(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(MemoryCheck, "estimate")
    config = tiny()
    check_of(config).require_fit(config)


@pytest.mark.parametrize("size", ["model.hidden_size=10000000", "model.embedding_size=10000000000000000"])
def test_absurd_sizes_raise_before_anything_is_allocated(command: Command, workspace: Path, size: str) -> None:
    done = command("train.py", *TINY, size, check=2)
    assert size.partition("=")[0] in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not (workspace / "runs").exists()


@pytest.mark.parametrize(
    ("settings", "share", "expected"),
    [
        (["trainer.batch_size=64", "trainer.bptt=40", "model.hidden_size=96"], 0.6, "trainer.micro_batches="),
        (["trainer.batch_size=1", "model.embedding_size=2", "model.hidden_size=512"], 0.8, "output=adaptive"),
        (["trainer.batch_size=1", "model.hidden_size=512"], 0.2, "model.hidden_size="),
        (["trainer.batch_size=1", "model.hidden_size=512", "model.projection=192"], 0.1, "projection="),
        (["trainer.batch_size=1", "model.hidden_size=512", "model.projection=192", *TIED], 0.2, "projection="),
        (["trainer.batch_size=1", "model=transformer", "model.hidden_size=384", "model.heads=6"], 0.3, "hidden_size="),
        (["model.maxent.order=3", "model.maxent.size=4194304"], 0.25, "model.maxent.size=524288"),
    ],
)
def test_advice_fits_into_the_free_memory(
    tiny: Tiny, settings: list[str], share: float, expected: str, workspace: Path
) -> None:
    settings = ["data.vocab_size=3000", "data.tokens=20000", *settings]
    config = tiny(*settings)
    check = check_of(config)
    free = int(share * check.estimate(config).total)
    advice = check.advice(config, free=free)
    assert expected in advice
    changes = advice.removeprefix("Try ").split(",")[0].split()
    assert check.estimate(tiny(*settings, *changes)).total < free
    assert not list(workspace.glob("run*"))


def raise_shortage(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_oom_in_training_gives_advice_and_keeps_the_checkpoint(
    command: Command, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.step

    def fail_at_25(trainer: Trainer, batch: object) -> None:
        if trainer.progress.step == 25:
            raise_shortage()
        step(trainer, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "step", fail_at_25)
    done = command("train.py", *TINY, "run_dir=run", "trainer.save_every_steps=10", check=2)
    assert done.stderr.startswith("Out of memory on cpu ") and "Try trainer.micro_batches=" in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1
    kept = torch.load(workspace / "run/checkpoints/last.pt", weights_only=True)
    assert kept["progress"]["step"] == 20


def test_oom_in_evaluation_names_its_batch_size(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    command("train.py", *TINY, "run_dir=run", "evaluate.batch_size=3")
    monkeypatch.setattr(FullSoftmax, "nll", raise_shortage)
    more = ["trainer.max_steps=80", "evaluate.batch_size=9"]
    for arguments in (["train.py", "resume=run", *more], ["evaluate.py", "checkpoint=run", "evaluate.batch_size=9"]):
        done = command(*arguments, check=2)
        assert "while evaluating. Try evaluate.batch_size=2 instead of 9" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_oom_while_loading_is_not_corruption(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    command("train.py", *TINY, "run_dir=run")
    monkeypatch.setattr(OutputLayer, "load_state_dict", raise_shortage)
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", raise_shortage)
    for arguments in (["train.py", "resume=run", "trainer.max_steps=80"], ["evaluate.py", "checkpoint=run"]):
        done = command(*arguments, check=2)
        assert "Out of memory on cpu" in done.stderr and "damaged" not in done.stderr


def train_with_little_memory() -> None:
    lm.training.memory_check.free_memory = lambda device: None  # type: ignore[assignment]  # noqa: ARG005, so that it is tried
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 400 * MIB, -1))
    train(*TINY, "model.hidden_size=6000", "run_dir=run")  # one allocation exceeds the limit


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a limit on address space")
def test_real_oom_gives_advice(workspace: Path) -> None:
    child = Fork(train_with_little_memory, folder=workspace)
    assert child.wait() == 2, child.err
    assert child.err.startswith("Out of memory on cpu while building or training the model. Try model.hidden_size=")


def test_other_errors_are_not_converted() -> None:
    assert not is_shortage(RuntimeError("shapes do not match")) and not is_shortage(ValueError("out of memory"))
    assert is_shortage(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 4 bytes"))
    assert is_shortage(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    with pytest.raises(RuntimeError, match="shapes"), explain_oom(CPU, doing="it", advice=lambda: ""):
        raise RuntimeError("shapes do not match")
    told = r"Out of memory on cpu while counting\. Count less\. Saved checkpoints are kept\."
    with pytest.raises(UserError, match=told), explain_oom(CPU, doing="counting", advice=lambda: "Count less."):
        raise MemoryError


# ---- dry runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["output=hsm_sim", "trainer.micro_batches=2 trainer.precision=bf16 model.layers=2"])
def test_dry_run_prints_shapes_memory_time(command: Command, workspace: Path, way: str) -> None:
    done = command("train.py", *TINY, *way.split(), "trainer.dry_run=true")
    assert sorted(path.name for path in workspace.iterdir()) == ["data"]
    assert not list(workspace.glob("data/*/brown*")), "no Brown classes are computed"
    assert "run      none: trainer.dry_run=true" in done.stdout
    assert re.search(r"input\.weight +32 x 8 +256 ", done.stdout)
    assert re.search(r"step     5 x 4 words.* -> embedded 5 x 4 x 8 -> hidden 5 x 4 x 12 -> loss", done.stdout)
    assert "epoch    100 steps, 2,000 tokens" in done.stdout
    assert re.search(r"memory   about [\d.]+ MiB: parameters .* MiB, optimizer .* MiB, step .* MiB", done.stdout)
    assert re.search(r"ms a step, [\d,]+ tokens/s; about \d+s of training", done.stdout)
    listed = re.findall(r"^\S+ +[\dx ]+  ([\d,]+) +[\d.]+ MiB$", done.stdout, re.M)
    total = re.search(r"model +([\d,]+) parameters", done.stdout)
    assert total is not None
    assert sum(int(number.replace(",", "")) for number in listed) == int(total[1].replace(",", ""))


def test_dry_run_respects_max_seconds(command: Command) -> None:
    done = command("train.py", *TINY, "trainer.dry_run=true", "trainer.max_steps=null", "trainer.max_seconds=7200")
    assert "about 2h00m of training" in done.stdout
