"""The estimate of memory against the tensors that real steps make."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lm.system.memory
from lm.config.schema import TrainConfig
from lm.data.batches import BatchLoader
from lm.data.opening import open_corpus
from lm.inference.scoring import score
from lm.model.base import DropoutMasks
from lm.optim.optimizer import build_optimizer
from lm.output.maxent import PIECE
from lm.runs.assembly import build_model, training_streams
from lm.runs.memory_estimate import laid_out, scoring_needs, training_needs
from lm.system.memory import _free_below, free_memory
from lm.training.step import ForwardBackward
from tests.helpers.ledger import Ledger

Tiny = Callable[..., TrainConfig]
SIZED = ["data.vocab_size=3000", "data.tokens=20000", "model.embedding_size=48", "model.hidden_size=96"]
WAYS = [
    "output=full trainer.batch_size=64 trainer.bptt=20",
    "output=full trainer.batch_size=64 trainer.bptt=20 trainer.micro_batches=4",
    "output=full trainer.batch_size=64 trainer.bptt=20 output.fused=false",
    "output=full trainer.batch_size=64 trainer.bptt=20 trainer.precision=bf16",
    "output=adaptive output.cutoffs=[300,1000] trainer.batch_size=64 trainer.bptt=40 model.dropout=0.2",
    "output=adaptive output.cutoffs=[300,1000] model.layers=3 trainer.batch_size=64 trainer.bptt=20",
    "output=sampled trainer.batch_size=16 trainer.bptt=10",
    "output=blackout trainer.batch_size=64 trainer.bptt=20",
    "output=nce trainer.batch_size=64 trainer.bptt=20",
    "output=self_normalized trainer.batch_size=64 trainer.bptt=20",
    "output=hsm_huffman trainer.batch_size=64 trainer.bptt=20",
    "output=hsm_freq trainer.batch_size=64 trainer.bptt=20 optim.embedding_update=dense",
    "output=dsoftmax_star output.cutoffs=[300,1000] optim.embedding_update=rowwise trainer.batch_size=32",
    "output=full trainer.batch_size=64 trainer.bptt=20 model.maxent.order=3 model.maxent.size=1000000",
    "output=full trainer.batch_size=64 output.fused=false model.maxent.order=3 model.maxent.size=100000",
    "output=adaptive output.cutoffs=[300,900,1800] trainer.batch_size=64 trainer.micro_batches=4 "
    "model.maxent.order=3 model.maxent.size=1000000",
]


def peak_of_a_step(config: TrainConfig, ledger: Ledger) -> int:
    """Bytes alive at the worst moment of building a model and taking two steps."""
    corpus = open_corpus(config.data, notice=lambda _: None)
    with ledger:
        model = build_model(config, corpus.vocabulary).train()
        optimizer, gradient = (
            build_optimizer(model, config.optim),
            ForwardBackward(model, precision=config.trainer.precision),
        )
        streams, micro = training_streams(config, corpus), config.trainer.micro_batches
        plans = model.output.plans, model.input.plan
        options = {"micro_batches": micro, "plan_input": plans[1], "look_back": model.output.look_back}
        loader = BatchLoader(streams, plans[0], seed=1, start=0, pin=False, **options)  # type: ignore[arg-type]
        batch = loader.make(0)
        for _ in range(2):
            state = model.core.initial_state(config.trainer.batch_size, device=model.device)
            loss, _ = gradient(batch, state, DropoutMasks.of_batch(1, 0, config.trainer.batch_size))
            optimizer.step(loss, lr=0.1, num_steps=1)
    return ledger.peak


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_estimate_is_what_a_step_needs(tiny: Tiny, way: str) -> None:
    config = tiny(*SIZED, *way.split())
    needs = training_needs(config, open_corpus(config.data, notice=lambda _: None).vocabulary)
    assert needs.total == pytest.approx(peak_of_a_step(config, Ledger()), rel=0.25), str(needs)


def test_groups_save_memory_in_truth_and_in_the_estimate(tiny: Tiny) -> None:
    settings = [*SIZED, "output=adaptive", "output.cutoffs=[300,1000]", "trainer.batch_size=64", "trainer.bptt=40"]
    vocabulary = open_corpus(tiny(*SIZED).data, notice=lambda _: None).vocabulary
    configs = [tiny(*settings, f"trainer.micro_batches={number}") for number in (1, 4)]
    whole, grouped = (peak_of_a_step(config, Ledger()) for config in configs)
    estimates = [training_needs(config, vocabulary).total for config in configs]
    assert grouped < 0.7 * whole
    assert estimates[1] < 0.7 * estimates[0]


def test_an_evaluation_needs_no_more_than_its_estimate(tiny: Tiny) -> None:
    config = tiny(*SIZED, "evaluate.batch_size=12", "evaluate.streams=12")
    corpus = open_corpus(config.data, notice=lambda _: None)
    model = build_model(config, corpus.vocabulary)
    with Ledger() as ledger:
        score(
            model,
            corpus.split("valid"),
            streams=12,
            batch_size=12,
            eos_id=corpus.vocabulary.eos_id,
            unk_id=corpus.vocabulary.unk_id,
            label="valid",
        )
    assert 0.3 * scoring_needs(config, corpus.vocabulary) < ledger.peak < 1.2 * scoring_needs(config, corpus.vocabulary)


def test_ngram_weights_are_counted_for_what_they_are(tiny: Tiny) -> None:
    """Not as weights of a softmax; and an evaluation copies only a piece's."""
    config, plain = (
        tiny(*SIZED, "output=full", f"model.maxent.order={order}", "model.maxent.size=1000000") for order in (3, "null")
    )
    vocabulary = open_corpus(config.data, notice=lambda _: None).vocabulary
    layer, without = (laid_out(each, vocabulary).output for each in (config, plain))
    assert layer.softmaxes(50, 50) == without.softmaxes(50, 50)
    assert scoring_needs(config, vocabulary) - scoring_needs(plain, vocabulary) <= 4 * PIECE


def test_some_memory_is_free() -> None:
    free = free_memory(torch.device("cpu"))
    assert free is not None and 1 << 20 < free < 1 << 50


def test_ranks_of_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm.system.memory, "_free_of_machine", lambda: 8000)
    monkeypatch.setattr(lm.system.memory, "_free_of_groups", lambda: None)
    assert free_memory(torch.device("cpu")) == 8000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_memory(torch.device("cpu")) == 2000


def test_the_tightest_control_group_counts(tmp_path: Path) -> None:
    """A cluster's job has its limit on a group above that of the process; `max` is none."""
    limits = {"": "max", "job": "5000", "job/step": "max"}
    for name, limit in limits.items():
        group = tmp_path / name
        group.mkdir(exist_ok=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text("3000\n")
        (group / "memory.stat").write_text("anon 7\ninactive_file 1000\n")
    assert _free_below(tmp_path, "0::/job/step\n") == 3000
    assert _free_below(tmp_path, "1:name=systemd:/x\n0::/\n") is None
    assert _free_below(tmp_path, "4:memory:/old\n") is None


def test_ranks_hold_less_of_a_batch_and_the_output_gradient_twice(tiny: Tiny) -> None:
    config = tiny("output=full", "trainer.batch_size=8")
    vocabulary = open_corpus(config.data, notice=lambda _: None).vocabulary
    alone, ranks = (training_needs(config, vocabulary, num_ranks=number) for number in (1, 4))
    assert ranks.activations < alone.activations
    assert ranks.parameters == alone.parameters
    assert ranks.gradients - alone.gradients == 4 * len(vocabulary) * config.model.hidden_size


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS[:5])
def test_the_estimate_is_what_a_step_needs_on_a_gpu(tiny: Tiny, way: str) -> None:
    """At sizes that outweigh what the libraries keep for themselves."""
    larger = ["data.vocab_size=50000", "model.embedding_size=256", "model.hidden_size=512", "data.tokens=200000"]
    way = way.replace("[300,1000]", "[3000,10000]").replace("batch_size=64", "batch_size=128")
    config = tiny(*larger, *way.split(), "data.tokens=400000")
    corpus = open_corpus(config.data, notice=lambda _: None)
    device = torch.device("cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = build_model(config, corpus.vocabulary).train().to(device)
    optimizer, gradient = (
        build_optimizer(model, config.optim),
        ForwardBackward(model, precision=config.trainer.precision),
    )
    streams, micro = training_streams(config, corpus), config.trainer.micro_batches
    with BatchLoader(streams, model.output.plans, seed=1, start=0, pin=True, micro_batches=micro) as loader:
        batch = loader.make(0).to(device)
    for _ in range(2):
        state = model.initial_state(config.trainer.batch_size)
        loss, _ = gradient(batch, state, DropoutMasks.of_batch(1, 0, config.trainer.batch_size))
        optimizer.step(loss, lr=0.1, num_steps=1)
    peak = torch.cuda.max_memory_allocated() - before
    assert training_needs(config, corpus.vocabulary).total == pytest.approx(peak, rel=0.5)
