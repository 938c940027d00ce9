"""The training step: its results, no device synchronization, and what ends a run."""

import math
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lm.training.run
from lm.config.schema import TrainConfig
from lm.data.batches import Batch
from lm.data.corpus import open_corpus
from lm.model.regularization import DropoutMasks
from lm.model.scoring import Score
from lm.system import checkpoint
from lm.system.errors import UserError
from lm.system.interrupt import Stopped, StopRequest
from lm.training.metrics import read_metrics
from lm.training.run import train, train_loop
from lm.training.run_dir import RunDir
from lm.training.run_writer import RunWriter
from lm.training.trainer import Trainer
from tests.conftest import Tiny
from tests.helpers.training import LAYERS, PLAIN, losses_of, make_trainer, no_waiting_for_the_gpu, reference_losses


@pytest.mark.parametrize("change", ["output=full", "optim.reduction=token", "output=adaptive output.cutoffs=[10]"])
def test_training_matches_plain_loop(tiny: Tiny, change: str) -> None:
    """Fifty steps, including short last batches, with active clipping; test_distributed covers ranks."""
    settings = [*PLAIN, *change.split()]
    config = tiny(*settings)
    corpus = open_corpus(config.data)
    _, batches = make_trainer(config, corpus, num_batches=50)
    assert {len(batch.targets_TB) for batch in batches} == {7, 5}
    expected = reference_losses(config, corpus, batches)
    for form, micro_batches in product(("sparse", "dense"), (1, 3)):
        way = f"optim.embedding={form}", f"trainer.micro_batches={micro_batches}"
        found = losses_of(*make_trainer(tiny(*settings, *way), corpus, num_batches=50))
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=str(way))


@pytest.mark.usefixtures("cuda")
def test_loop_reads_nothing_between_logs(tiny: Tiny, tmp_path: Path) -> None:
    """Loader, clocks, limits and progress must not wait for the device either."""
    config = tiny("output=adaptive", "output.cutoffs=[10,20]", "model.hidden_size=64", "trainer.log_every_steps=1000")
    corpus = open_corpus(config.data)
    trainer, _ = make_trainer(config, corpus, device="cuda")
    writer = RunWriter(RunDir(tmp_path), trainer, corpus=corpus, clusters=None)
    writer.save()  # before the loop: a save reads whether the weights are finite
    writer.checkpoints.wait()
    writer._saved_step = 0
    stop, step = StopRequest(), trainer.step

    def counted(batch: Batch) -> None:
        step(batch)
        stop.signal = int(trainer.progress.step >= 20)

    trainer.step = counted  # type: ignore[method-assign]
    with no_waiting_for_the_gpu(), pytest.raises(Stopped):
        train_loop(trainer, pytest.fail, writer, stop, profiler=None)
    assert trainer.progress.step == 20


def progress_of(config: TrainConfig) -> dict[str, Any]:
    """Read the progress in a run's last checkpoint."""
    assert config.run_dir is not None
    progress: dict[str, Any] = checkpoint.load(Path(config.run_dir) / "checkpoints/last.pt")["progress"]
    return progress


def test_non_finite_loss_raises_and_keeps_the_last_good_checkpoint(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    config, step = tiny("trainer.save_every_steps=5", "trainer.log_every_steps=4", "optim.lr=0.2"), Trainer.step

    def poisoned(trainer: Trainer, batch: Batch) -> None:
        if trainer.progress.step == 17:
            with torch.no_grad():
                trainer.model.output.weight[3] = math.nan  # type: ignore[index, operator]
        step(trainer, batch)

    monkeypatch.setattr(Trainer, "step", poisoned)
    with pytest.raises(UserError, match=r"diverged: .* not finite at step 18, with optim.lr=0.2 .*optim.lr=0.05"):
        train(config, [])
    content = checkpoint.load(Path(str(config.run_dir)) / "checkpoints/last.pt")
    assert content["progress"]["step"] == 15
    assert all(torch.isfinite(value).all() for value in content["model"].values())


def test_validation_of_unknown_words_is_named(tiny: Tiny) -> None:
    config = tiny()
    corpus = open_corpus(config.data)
    trainer, _ = make_trainer(config, corpus)
    tokens_V = np.eye(len(corpus.vocabulary), dtype=np.int64)[corpus.vocabulary.unk_id] * 98
    tokens_V[1:3] += 1
    score = Score(tokens_V, tokens_V * 50.0, corpus.vocabulary.unk_id, streams=1, seconds=1.0, cutoffs=())
    with pytest.raises(UserError, match=r"validation loss \(of 98% unknown words: is it the right text\?\) is 50 at"):
        trainer.record_evaluation(score)


@pytest.mark.parametrize("settings", ["optim.lr=100", "optim.lr=1e6", "optim.lr=1e4 trainer.precision=bf16"])
@pytest.mark.parametrize("logged", [5, 1000])
def test_finite_but_hopeless_loss_raises(tiny: Tiny, settings: str, logged: int) -> None:
    """Detected when the training loss is logged, or else by the evaluation."""
    config = tiny(*settings.split(), "optim.weight_decay=0", f"trainer.log_every_steps={logged}")
    with pytest.raises(UserError, match=r"Training diverged: the \w+ loss is \S+ at step \d+.*try optim.lr=0.1"):
        train(config, [])
    assert not (Path(str(config.run_dir)) / "checkpoints/best.pt").exists()


def test_high_but_falling_loss_is_not_divergence(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    config, step = tiny("trainer.log_every_steps=5"), Trainer.step

    def bad_start(trainer: Trainer, batch: Batch) -> None:
        step(trainer, batch)
        uniform = math.log(trainer.model.output.vocab_size)
        trainer.loss_sum += 10 * uniform * batch.num_tokens / (1 + trainer.progress.step)

    monkeypatch.setattr(Trainer, "step", bad_start)
    train(config, [])
    first = next(r["train/loss"] for r in read_metrics(Path(str(config.run_dir))) if "train/loss" in r)
    assert first > 2 * math.log(22)


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
    config = tiny(*limits.split())
    train(config, [])
    progress = progress_of(config)
    assert progress["step"] == steps
    assert progress["evaluated_step"] == steps, "the end of a run is always evaluated"


def test_max_seconds_counts_training_only(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two clocks together never exceed the elapsed time: no time is counted twice."""
    config = tiny("trainer.max_steps=null", "trainer.max_seconds=0.2", "trainer.eval_every_steps=10")
    score = lm.training.run.score

    def slow(*arguments: Any, **options: Any) -> Score:
        time.sleep(0.05)
        return score(*arguments, **options)

    monkeypatch.setattr(lm.training.run, "score", slow)
    began = time.monotonic()
    train(config, [])
    elapsed, progress = time.monotonic() - began, progress_of(config)
    assert progress["train_seconds"] >= 0.2
    assert progress["eval_seconds"] >= 0.05
    assert progress["train_seconds"] + progress["eval_seconds"] <= elapsed
    assert progress["evaluated_step"] == progress["step"]


def test_evaluations_at_epochs_and_every_n_steps(tiny: Tiny) -> None:
    config = tiny("trainer.max_steps=250", "trainer.eval_every_steps=80")
    train(config, [])
    records = read_metrics(Path(str(config.run_dir)))
    assert [r["step"] for r in records if "valid/ppl" in r] == [80, 100, 160, 200, 240, 250]
    assert [r["step"] for r in records if "train/loss" in r] == list(range(7, 251, 7))
    logged = [r for r in records if "train/loss" in r]
    assert {"optim/lr", "optim/grad_norm", "memory/peak_gib", "train/ppl"} <= logged[0].keys()
    assert logged[1]["speed/tokens_per_s"] > 0


# ---- micro-batches ---------------------------------------------------------------------------------------------------


ROUGH = ["model.hidden_size=64", "model.dropout=0.3", "model.layers=2"]


@pytest.mark.parametrize("form", [*LAYERS, "optim.embedding=rowwise", "optim.embedding=dense"])
def test_micro_batches_sum_to_the_whole_batch(tiny: Tiny, form: str) -> None:
    """Compares losses, weights and state after several updates with dropout, decay and clipping."""
    settings = [*form.split(), *ROUGH, "optim.max_grad_norm=0.5", "optim.weight_decay=1e-4"]
    corpus = open_corpus(tiny().data)
    whole, batches = make_trainer(tiny(*settings), corpus)
    grouped, same_batches = make_trainer(tiny(*settings, "trainer.micro_batches=3"), corpus)
    assert [group.stop - group.start for group in same_batches[0].groups] == [1, 1, 2]
    np.testing.assert_allclose(losses_of(grouped, same_batches), losses_of(whole, batches), rtol=1e-5)
    expected, found = whole.model.state_dict(), grouped.model.state_dict()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-4, msg=name)
    for layer_found, layer_expected in zip(grouped.state, whole.state, strict=True):
        torch.testing.assert_close(layer_found, layer_expected, rtol=1e-3, atol=1e-5)


def step_gradient(config: TrainConfig) -> dict[str, Tensor]:
    """Return a batch's loss and gradients, including sparse rows."""
    trainer, batches = make_trainer(config, open_corpus(config.data), num_batches=1)
    model = trainer.model
    noise = DropoutMasks(config.seed, 0, config.trainer.batch_size, slice(0, config.trainer.batch_size))
    losses, state = trainer.forward_backward(batches[0], trainer.state, noise)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    rows = model.input.take_used()
    assert rows is not None and rows.values.grad is not None
    assert all(part.dtype == torch.float32 and not part.requires_grad for layer in state for part in layer)
    return {"loss": losses[0], "embedding": rows.values.grad, **found}


@pytest.mark.parametrize("layer", LAYERS)
def test_bf16_gradients_are_close_to_float32(tiny: Tiny, layer: str) -> None:
    settings = [*layer.split(), *ROUGH, "model.projection=32"]
    exact = step_gradient(tiny(*settings))
    rounded = step_gradient(tiny(*settings, "trainer.precision=bf16"))
    assert not torch.equal(exact["embedding"], rounded["embedding"]), "nothing was rounded"
    torch.testing.assert_close(rounded["loss"], exact["loss"], rtol=0.01, atol=0)
    for name, gradient in exact.items():
        assert rounded[name].dtype == torch.float32, name
        if name != "loss" and gradient.norm() > 0:
            cosine = torch.cosine_similarity(gradient.flatten(), rounded[name].flatten(), dim=0)
            assert cosine > 0.99, (name, cosine)
