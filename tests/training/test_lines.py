"""`data.sequences=lines`: losses are those of single lines, and runs resume exactly."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lm.config.schema import TrainConfig
from lm.data.corpus import open_corpus
from tests.conftest import Command
from tests.helpers.ranks import losses_alone, run_ranks, train_all
from tests.helpers.training import assert_resume_is_identical, losses_of, make_trainer


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Lines of 0 to 9 words."""
    generator = np.random.default_rng(1)
    for split, number in {"train": 120, "valid": 30, "test": 20}.items():
        lines = [" ".join(f"w{w}" for w in generator.integers(0, 20, n)) for n in generator.integers(1, 10, number)]
        (tmp_path / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.fixture
def config(compose: Callable[..., TrainConfig], text: Path) -> TrainConfig:
    data = ["data=text", f"data.dir={text}", f"data.root={text}/data", "data.sequences=lines", "output=full"]
    sizes = ["model=small", "model.hidden_size=12", "model.embedding_size=8", "model.dropout=0"]
    return compose(*data, *sizes, "trainer.batch_size=4", "trainer.bptt=4")


def test_loss_is_the_mean_over_tokens_of_single_lines(config: TrainConfig) -> None:
    """Summed over a batch's steps, it equals the sum of each line's score from a zero state."""
    corpus = open_corpus(config.data)
    trainer, batches = make_trainer(config, corpus, num_batches=20)
    model = trainer.model.eval()
    state, total, lines = trainer.initial_state(), 0.0, [[] for _ in range(4)]
    for batch in batches:
        if batch.resets:
            expected = 0.0
            for line in filter(None, lines):
                words = torch.tensor([corpus.vocabulary.eos_id, *line[:-1]])[:, None]
                predictions, _ = model.read(words, model.initial_state(1))
                expected += predictions.nll(torch.tensor(line)[:, None]).sum().item()
            assert total == pytest.approx(expected, rel=1e-5)
            state, total, lines = trainer.initial_state(), 0.0, [[] for _ in range(4)]
        losses, state = trainer.forward_backward(batch, state, trainer.dropout_masks())
        assert batch.num_tokens == int((batch.targets_TB >= 0).sum())
        total += losses[0].item() * batch.num_tokens
        for stream in range(4):
            lines[stream] += [word for word in batch.targets_TB[:, stream].tolist() if word >= 0]
    trainer.model.zero_grad()


def test_micro_batches_give_the_same_update(config: TrainConfig) -> None:
    corpus = open_corpus(config.data)
    grouped = replace(config, trainer=replace(config.trainer, micro_batches=3))
    expected = losses_of(*make_trainer(config, corpus, num_batches=15))
    np.testing.assert_allclose(losses_of(*make_trainer(grouped, corpus, num_batches=15)), expected, rtol=1e-4)


def test_resume_is_bit_identical(config: TrainConfig) -> None:
    assert_resume_is_identical(config, open_corpus(config.data), interrupted_at=5)


@pytest.mark.slow
def test_two_ranks_match_one_process(config: TrainConfig, workspace: Path) -> None:
    expected = losses_alone(config, 8)
    ended = run_ranks(train_all, [config], 8, ranks=2, folder=workspace)
    assert ended.codes == [0, 0], ended.err
    np.testing.assert_allclose(json.loads((workspace / "losses.json").read_text()), [expected], rtol=1e-4)


def test_evaluation_agrees_with_scores_of_lines(text: Path, command: Command, workspace: Path) -> None:
    settings = ["data=text", f"data.dir={text}", "data.sequences=lines", "model=small", "output=full"]
    limits = ["trainer.batch_size=4", "trainer.max_epochs=2", "trainer.threads=1", "run_dir=run"]
    done = command("train.py", *settings, *limits)
    assert "Scored line by line." in done.stdout
    command("evaluate.py", "checkpoint=run", "splits=[test]", "json=found.json")
    found = json.loads((workspace / "found.json").read_text())["splits"]["test"]
    scored = command("evaluate.py", "checkpoint=run", "mode=score", f"input={text / 'test.txt'}").stdout.splitlines()
    log_probs = [float(line.split("\t")[0]) for line in scored]
    tokens = sum(int(line.split("\t")[1]) for line in scored)
    assert found["tokens"] == tokens
    assert np.log(found["perplexity"]) == pytest.approx(-sum(log_probs) / tokens, abs=1e-5)
    assert "lines" in (workspace / "run/config.yaml").read_text()
