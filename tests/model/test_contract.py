"""Interface tests for all cores and inputs, including future plug-ins."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lm.config.schema import TrainConfig
from lm.data.corpus import open_corpus
from lm.model.base import detach, select_streams
from lm.model.language_model import build_model
from lm.model.regularization import DropoutMasks, drop
from lm.system.tree import leaves
from tests.conftest import Tiny, run_command
from tests.helpers.ranks import Group, losses_alone, train_all
from tests.helpers.training import assert_resume_is_identical, losses_of, make_trainer
from tests.helpers.ways import AWD, CORES, INPUTS, MAXENT, TIED, TRANSFORMER, VARIANTS, WAYS

each_way = pytest.mark.parametrize("way", WAYS)
each_core = pytest.mark.parametrize("core", [*CORES, *VARIANTS])
CPU = torch.device("cpu")


def make(tiny: Tiny, way: str, **changes: object) -> TrainConfig:
    """Compose the settings of a variant (cached); each change applies to the group with that key."""
    config = tiny(*way.split())
    for key, value in changes.items():
        group = next(g for g in (config.model, config.trainer, config.optim) if hasattr(g, key))
        setattr(group, key, value)
    return config


@each_core
def test_carried_state_matches_one_pass(tiny: Tiny, core: str) -> None:
    """Streams are on dimension 1 of the state and are independent of each other."""
    config = make(tiny, core)
    model = build_model(config, open_corpus(config.data).vocabulary).core.eval()
    input_TBE = torch.randn(10, 3, config.model.embedding_size)
    state = model.initial_state(3, device=CPU)
    whole, after = model(input_TBE, state, None)
    assert whole.shape == (10, 3, config.model.width) and model.width == config.model.width
    first, between = model(input_TBE[:4], state, None)
    second, end = model(input_TBE[4:], between, None)
    torch.testing.assert_close(torch.cat([first, second]), whole)
    for ours, expected in zip(leaves(end), leaves(after), strict=True):
        torch.testing.assert_close(ours, expected)
    alone, _ = model(input_TBE[4:, 1:2], select_streams(between, slice(1, 2)), None)
    torch.testing.assert_close(alone[:, 0], second[:, 1])
    assert all(t.dtype == torch.float32 and not t.requires_grad for t in leaves(detach(end)))


@pytest.mark.parametrize("core", [f"model={core} model.layers=2" for core in ("lstm", "gru", "feedforward")])
def test_dropout_between_layers_depends_on_seed_step_and_stream(tiny: Tiny, core: str) -> None:
    config = make(tiny, core, dropout=0.5)
    model = build_model(config, open_corpus(config.data).vocabulary).core
    input_TBE = torch.randn(6, 4, config.model.embedding_size)
    state = model.initial_state(4, device=CPU)

    def run(step: int) -> torch.Tensor:
        torch.manual_seed(int(torch.randint(1000, ())))  # earlier draws must not matter
        hidden: torch.Tensor = model(input_TBE, state, DropoutMasks(1, step, 4, slice(0, 4)))[0]
        return hidden

    whole = run(5)
    assert torch.equal(whole, run(5)) and not torch.equal(whole, run(6))
    assert not torch.equal(whole, model(input_TBE, state, None)[0])
    masks = replace(DropoutMasks(1, 5, 4, slice(0, 4)), streams=slice(1, 3))
    part, _ = model(input_TBE[:, 1:3], select_streams(state, slice(1, 3)), masks)
    torch.testing.assert_close(part, whole[:, 1:3])


def test_dropout_preserves_mean_and_masks_follow_streams() -> None:
    masks, ones = DropoutMasks(1, 1, 20, slice(0, 20)), torch.ones(200, 20, 5)
    dropped = drop(ones, masks, 0.25, layer="embedding")
    assert set(dropped.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert dropped.mean().item() == pytest.approx(1, abs=0.02)
    rank = replace(masks, streams=slice(5, 15))
    for first, last in ((0, 10), (1, 4)):  # among the rank's ten streams
        part = drop(ones[:, : last - first], rank.of(slice(first, last)), 0.25, layer="embedding")
        assert torch.equal(part, dropped[:, 5 + first : 5 + last])


@pytest.mark.slow
@each_way
def test_micro_batches_and_bfloat16_match_float32(tiny: Tiny, way: str) -> None:
    config = make(tiny, way, dropout=0.2, max_grad_norm=0.5, weight_decay=1e-4)
    corpus = open_corpus(config.data)
    exact = losses_of(*make_trainer(config, corpus, num_batches=12))
    grouped = replace(config, trainer=replace(config.trainer, micro_batches=3))
    np.testing.assert_allclose(losses_of(*make_trainer(grouped, corpus, num_batches=12)), exact, rtol=1e-4)
    bf16 = replace(config, trainer=replace(config.trainer, precision="bf16"))
    rounded = losses_of(*make_trainer(bf16, corpus, num_batches=12))
    np.testing.assert_allclose(rounded, exact, rtol=0.05)
    assert rounded != exact


@each_way
def test_resume_is_bit_identical(tiny: Tiny, way: str) -> None:
    """Twelve steps versus six, a checkpoint, fresh objects and six more."""
    config = make(tiny, way, dropout=0.2, weight_decay=1e-4)
    corpus = open_corpus(config.data)
    assert_resume_is_identical(config, corpus, interrupted_at=6)


@pytest.mark.slow
def test_two_ranks_match_one_process(tiny: Tiny, workspace: Path) -> None:
    """Covers inputs, tying, n-gram weights, micro-batches and row-wise accumulators."""
    more = {"dropout": 0.2, "batch_size": 8, "weight_decay": 1e-4, "max_grad_norm": 0.5}
    plain = [make(tiny, way, **more) for way in (CORES[0], TRANSFORMER, *INPUTS, *TIED, *MAXENT, *AWD)]
    grouped = [make(tiny, way, micro_batches=2, **more) for way in (*TIED, MAXENT[1], AWD[0])]
    configs = [*plain, *grouped, make(tiny, INPUTS[0], embedding="rowwise", **more)]
    open_corpus(configs[0].data)  # prepared once for all ranks
    group = Group(train_all, configs, 4, ranks=2, folder=workspace)
    expected = [losses_alone(config, 4) for config in configs]
    ended = group.ended()
    assert ended.codes == [0, 0], ended.err
    found = json.loads((workspace / "losses.json").read_text())
    for config, ours, theirs in zip(configs, found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, err_msg=str(config))


@pytest.mark.parametrize("way", [INPUTS[1], TIED[1]])
def test_run_evaluates_and_generates(workspace: Path, way: str) -> None:
    settings = ["data=zipf", "data.vocab_size=30", "data.tokens=2000", "output=full", *way.split()]
    limits = ["trainer.batch_size=4", "trainer.bptt=5", "trainer.max_epochs=null", "trainer.max_steps=6"]
    run_command(workspace, "train.py", *settings, *limits, "run_dir=run", "trainer.threads=1")
    run_command(workspace, "evaluate.py", "checkpoint=run", "splits=[valid]")
    assert run_command(workspace, "lm/generate.py", "checkpoint=run", "max_words=5").stdout
