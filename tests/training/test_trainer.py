"""The training step: what it computes, that it never asks the device for a number, and what stops a run."""

import math
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from lm.config.groups import EmbeddingUpdate, Reduction
from lm.config.schema import TrainConfig
from lm.data.batches import Batch
from lm.data.opening import open_corpus
from lm.model.scoring import Score
from lm.system.errors import UserError
from lm.system.interrupt import Stopped, StopRequest
from lm.training.assembly import training_streams
from lm.training.metrics import read_metrics
from lm.training.run import Run
from lm.training.run_dir import RunDir
from lm.training.trainer import Trainer
from tests.helpers.no_questions import NoQuestions
from tests.helpers.training import LAYERS, PLAIN, losses_of, make_trainer, no_waiting_for_the_gpu, reference_losses

Tiny = Callable[..., TrainConfig]


@pytest.mark.parametrize("reduction", list(Reduction))
def test_training_is_the_plain_training(tiny: Tiny, reduction: Reduction) -> None:
    """Fifty steps, short last batches of epochs among them, with a clip that acts; for ranks see test_distributed."""
    config = tiny(*PLAIN, f"optim.reduction={reduction.value}")
    corpus = open_corpus(config.data, notice=lambda _: None)
    _, batches = make_trainer(config, corpus, num_batches=50)
    assert {len(batch.targets_TB) for batch in batches} == {7, 5}
    expected = reference_losses(config, corpus, batches)
    for form, micro_batches in product((EmbeddingUpdate.sparse, EmbeddingUpdate.dense), (1, 3)):
        way = f"optim.embedding_update={form.value}", f"trainer.micro_batches={micro_batches}"
        ours = tiny(*PLAIN, f"optim.reduction={reduction.value}", *way)
        found = losses_of(*make_trainer(ours, corpus, num_batches=50))
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=str(way))


@pytest.mark.parametrize("layer", ["output=full", "output=adaptive output.cutoffs=[10]"])
def test_two_hundred_steps_are_those_of_the_plain_training(tiny: Tiny, layer: str) -> None:
    settings = ["model.dropout=0", "optim.embedding_update=dense", "model.hidden_size=32"]
    config = tiny(*settings, *layer.split())
    corpus = open_corpus(config.data, notice=lambda _: None)
    trainer, batches = make_trainer(config, corpus, num_batches=200)
    losses = losses_of(trainer, batches)
    np.testing.assert_allclose(losses, reference_losses(config, corpus, batches), rtol=1e-3)
    assert np.mean(losses[-20:]) < 0.95 * np.mean(losses[:20]), "and something was learnt"


VARIATIONS = [
    *LAYERS,
    "optim.embedding_update=rowwise",
    "optim.embedding_update=dense",
    "optim.weight_decay=0",
    "optim=adam optim.schedule=cosine trainer.average=0.99 output=sampled",
    "optim=adam optim.embedding_update=rowwise",
    "optim=sgd optim.momentum=0.9",
    "optim=rmsprop optim.warmup_steps=3",
    "trainer.precision=bf16 model.dropout=0.2",
    *(f"{layer} trainer.micro_batches=3 trainer.precision=bf16 model.dropout=0.2" for layer in LAYERS),
]


@pytest.mark.parametrize("variation", VARIATIONS)
def test_a_step_asks_the_device_for_nothing(tiny: Tiny, variation: str) -> None:
    config = tiny(*variation.split(), "model.hidden_size=64")
    trainer, batches = make_trainer(config, open_corpus(config.data, notice=lambda _: None), num_batches=3)
    with NoQuestions():
        for batch in batches:
            trainer.train_step(batch)
    assert math.isfinite(trainer.loss_sum.item())


class AfterSteps(StopRequest):
    """Asks a trainer to stop after so many steps."""

    def __init__(self, trainer: Trainer, steps: int) -> None:
        super().__init__()
        self.trainer, self.steps = trainer, steps

    def pending(self) -> int:
        return 1 if self.trainer.progress.step >= self.steps else 0


def test_the_loop_asks_for_nothing_between_logs(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loader, clocks, limits and progress around the step are as quiet as the step."""
    config = tiny("output=adaptive", "output.cutoffs=[10,20]", "model.hidden_size=64", "trainer.log_every_steps=1000")
    trainer, _ = make_trainer(config, open_corpus(config.data, notice=lambda _: None))
    trainer.stop = AfterSteps(trainer, 20)
    monkeypatch.setattr(trainer, "save", lambda **_: None)  # a save reads whether the weights are sound
    with NoQuestions(), pytest.raises(Stopped):
        trainer.run()
    assert trainer.progress.step == 20


@pytest.mark.parametrize("variation", VARIATIONS)
def test_a_step_runs_on_the_meta_device(tiny: Tiny, variation: str) -> None:
    """Where tensors have no values, whoever asks for one fails."""
    config = tiny(*variation.split(), "model.hidden_size=64")
    corpus = open_corpus(config.data, notice=lambda _: None)
    trainer, (batch,) = make_trainer(config, corpus, device="meta", num_batches=1)
    trainer.train_step(batch)
    assert trainer.loss_sum.is_meta


def make_run(config: TrainConfig) -> Run:
    corpus = open_corpus(config.data, notice=lambda _: None)
    streams = training_streams(config, corpus)
    assert config.run_dir is not None
    run_dir = RunDir(Path(config.run_dir))
    return Run(config, corpus=corpus, streams=streams, run_dir=run_dir, device=torch.device("cpu"))


def test_a_non_finite_loss_stops_the_run_and_keeps_the_last_good_checkpoint(tiny: Tiny) -> None:
    run = make_run(tiny("trainer.save_every_steps=5", "trainer.log_every_steps=4", "optim.lr=0.2"))
    step = run.trainer.train_step

    def poisoned(batch: Batch) -> None:
        if run.trainer.progress.step == 17:
            with torch.no_grad():
                run.model.output.weight[3] = math.nan  # type: ignore[index, operator]
        step(batch)

    run.trainer.train_step = poisoned  # type: ignore[method-assign]
    with pytest.raises(UserError) as error:
        run.execute()
    assert "diverged" in str(error.value)
    assert "stopped being a finite number at step 18, with optim.lr=0.2" in str(error.value)
    assert "optim.lr=0.05" in str(error.value)
    content = torch.load(run.run_dir.last, weights_only=True)
    assert content["progress"]["step"] == 15
    assert all(torch.isfinite(value).all() for value in content["model"].values())


@pytest.mark.parametrize("settings", ["optim.lr=100", "optim.lr=1e6", "optim.lr=1e4 trainer.precision=bf16"])
@pytest.mark.parametrize("logged", [5, 1000])
def test_a_loss_that_is_finite_but_past_recovery_stops_the_run(tiny: Tiny, settings: str, logged: int) -> None:
    """Found in training where it is logged, else at the evaluation."""
    run = make_run(tiny(*settings.split(), "optim.weight_decay=0", f"trainer.log_every_steps={logged}"))
    with pytest.raises(UserError, match=r"Training diverged: the \w+ loss is \S+ at step \d+.*try optim.lr=0.1"):
        run.execute()
    assert not run.run_dir.best.exists()


def test_a_bad_start_is_no_divergence_while_the_loss_falls(tiny: Tiny) -> None:
    run = make_run(tiny("trainer.log_every_steps=5"))
    step, uniform = run.trainer.train_step, math.log(run.model.output.vocab_size)

    def bad_start(batch: Batch) -> None:
        step(batch)
        run.trainer.loss_sum += 10 * uniform * batch.num_tokens / (1 + run.trainer.progress.step)

    run.trainer.train_step = bad_start  # type: ignore[method-assign]
    run.execute()
    first = next(r["train/loss"] for r in read_metrics(run.run_dir.path) if "train/loss" in r)
    assert first > 2 * uniform


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ("trainer.max_steps=9", 9),
        ("trainer.max_steps=null trainer.max_tokens=61", 4),
        ("trainer.max_steps=null trainer.max_epochs=2", 200),
        ("trainer.max_steps=3 trainer.max_epochs=1 trainer.max_tokens=1000", 3),
    ],
)
def test_limits(tiny: Tiny, limits: str, steps: int) -> None:
    run = make_run(tiny(*limits.split()))
    run.trainer.run()
    assert run.trainer.progress.step == steps
    assert run.trainer.progress.evaluated_step == steps, "the end of a run is always evaluated"


def test_max_seconds_counts_training_only(tiny: Tiny) -> None:
    """The two clocks together never exceed the time that has passed: what one counts the other does not."""
    run = make_run(tiny("trainer.max_steps=null", "trainer.max_seconds=0.2", "trainer.eval_every_steps=10"))
    evaluate = run.trainer._evaluate

    def slow() -> Score | None:
        time.sleep(0.05)
        return evaluate()

    run.trainer._evaluate = slow
    began = time.monotonic()
    run.trainer.run()
    passed = time.monotonic() - began
    trained, evaluated = run.trainer.train_clock.seconds, run.trainer.eval_clock.seconds
    assert trained >= 0.2
    assert evaluated >= 0.05
    assert trained + evaluated <= passed
    assert run.trainer.progress.evaluated_step == run.trainer.progress.step


def test_evaluations_fall_on_epochs_and_on_every_n_steps(tiny: Tiny) -> None:
    run = make_run(tiny("trainer.max_steps=250", "trainer.eval_every_steps=80"))
    run.trainer.run()
    records = read_metrics(run.run_dir.path)
    assert [r["step"] for r in records if "valid/ppl" in r] == [80, 100, 160, 200, 240, 250]
    assert [r["step"] for r in records if "train/loss" in r] == list(range(7, 251, 7))
    logged = [r for r in records if "train/loss" in r]
    assert {"optim/lr", "optim/grad_norm", "memory/peak_gib", "train/ppl"} <= logged[0].keys()
    assert logged[1]["speed/tokens_per_s"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("layer", LAYERS)
def test_a_step_on_a_gpu_waits_for_nothing_and_agrees_with_the_cpu(tiny: Tiny, layer: str) -> None:
    config = tiny(*layer.split(), "model.hidden_size=64", "model.dropout=0")
    corpus = open_corpus(config.data, notice=lambda _: None)
    on_gpu, batches = make_trainer(config, corpus, device="cuda")
    on_cpu, same_batches = make_trainer(config, corpus)
    on_gpu.train_step(batches[0])  # kernels are loaded, buffers are made
    with no_waiting_for_the_gpu():
        for batch in batches[1:]:
            on_gpu.train_step(batch)
    for batch in same_batches:
        on_cpu.train_step(batch)
    assert on_gpu.loss_sum.item() == pytest.approx(on_cpu.loss_sum.item(), rel=1e-3)
