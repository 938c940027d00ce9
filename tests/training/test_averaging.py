"""The lazy EMA of the weights against a dense EMA updated after every step."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lm.inference.open_model import open_model
from lm.optim import sparse_table
from lm.optim.optimizer import build_optimizer
from lm.optim.optimizers.decoupled import SGDConfig
from lm.training.averaging import WeightAverage, use_average
from tests.conftest import TINY, Command
from tests.helpers.toy_model import Toy, batches

KEEP = 0.9


class Averaged:
    """A toy model in training, its EMA, and a dense reference EMA."""

    def __init__(self, *, weight_decay: float = 0.0) -> None:
        settings = SGDConfig("sgd", 0.5, weight_decay=weight_decay)
        self.model, self.dense = Toy(sparse=True), Toy(sparse=False)  # the reference decays every step
        self.optimizer, self.dense_optimizer = (build_optimizer(m, settings) for m in (self.model, self.dense))
        self.average = WeightAverage(self.model, keep=KEEP)
        self.expected = {name: value.double() for name, value in self.dense.state_dict().items()}
        self.num_steps = 0

    def train(self, steps: list[Tensor]) -> None:
        for words_N in steps:
            for model, optimizer in ((self.model, self.optimizer), (self.dense, self.dense_optimizer)):
                loss = model.loss(words_N)
                loss.backward()
                optimizer.step(loss.detach(), lr=0.5, num_steps=1)
            self.average.step()
            self.num_steps += 1
            keep = min(KEEP, (1 + self.num_steps) / (10 + self.num_steps))
            for name, value in self.dense.state_dict().items():
                self.expected[name] = keep * self.expected[name] + (1 - keep) * value.double()

    def assert_as_defined(self, *, rtol: float = 1e-6) -> None:
        self.optimizer.apply_pending_decay()
        with self.average.in_place():
            for name, value in self.model.state_dict().items():
                torch.testing.assert_close(value.double(), self.expected[name], rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("block", [5, 1 << 14])
def test_lazy_ema_equals_dense_ema(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_table, "BLOCK_ROWS", block)
    both = Averaged()
    both.train(batches(40))
    both.assert_as_defined()
    both.train(batches(7))
    both.assert_as_defined()


def test_decay_of_idle_rows_reaches_their_average() -> None:
    """The average of an idle row uses the row's weight at its next read."""
    both = Averaged(weight_decay=0.01)
    start = both.model.input.weight[-1].clone()
    both.train(batches(40))
    both.assert_as_defined(rtol=0.06)  # decay over the last ten steps or so, which dominate the average
    with both.average.in_place():
        never_used = both.model.input.weight[-1]
        torch.testing.assert_close(never_used, start * (1 - 0.5 * 0.01) ** 40, rtol=0.03, atol=0)


def test_ema_weights_are_swapped_in_and_out() -> None:
    both = Averaged()
    both.train(batches(10))
    before = {name: value.clone() for name, value in both.model.state_dict().items()}
    with both.average.in_place():
        assert not torch.equal(both.model.core.weight, before["core.weight"])
    for name, value in both.model.state_dict().items():
        assert torch.equal(value, before[name])


def test_step_updates_only_averages_of_its_rows() -> None:
    both = Averaged()
    both.train(batches(5))
    before = both.average.averages["input.weight"].clone()
    words_N = torch.tensor([0, 3, 3])
    both.train([words_N])
    changed = (both.average.averages["input.weight"] != before).any(1)
    assert changed.nonzero().flatten().tolist() == [0, 3]


def test_ema_survives_resume_between_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_table, "BLOCK_ROWS", 5)
    whole, broken = Averaged(), Averaged()
    for both in (whole, broken):
        both.train(batches(9))
    fresh = Averaged()
    fresh.dense, fresh.dense_optimizer = broken.dense, broken.dense_optimizer
    fresh.model.load_state_dict(broken.model.state_dict())
    fresh.optimizer.load_state_dict(broken.optimizer.state_dict())
    fresh.average.load_state_dict(broken.average.state_dict())
    fresh.expected, fresh.num_steps = broken.expected, broken.num_steps
    for both in (whole, fresh):
        both.train(batches(4))
    fresh.assert_as_defined()
    user = Toy(sparse=True)
    user.load_state_dict(whole.model.state_dict())
    use_average(user, whole.average.state_dict())
    with whole.average.in_place(), fresh.average.in_place():
        for name, value in user.state_dict().items():
            assert torch.equal(value, whole.model.state_dict()[name])
            assert torch.equal(value, fresh.model.state_dict()[name])


def test_evaluation_uses_ema_weights(command: Command, workspace: Path) -> None:
    settings = [*TINY, "run_dir=run", "trainer.average=0.97", "optim=adam", "optim.lr=0.05"]
    trained = command("train.py", *settings)
    used = command("evaluate.py", "checkpoint=run", "splits=[valid]")
    last = next(line for line in trained.stdout.splitlines() if line.startswith("last (step 40)"))
    assert last.split()[-2] in used.stdout
    content = torch.load(workspace / "run/checkpoints/last.pt", weights_only=True)
    model = open_model(str(workspace / "run"), device="cpu").model
    for name, value in model.named_parameters():
        assert torch.equal(value, content["average"]["weights"][name]), name
        assert not torch.equal(value, content["model"][name]), name


def test_asgd_averages_all_weights_since_its_trigger() -> None:
    """The trigger compares with the best of the evaluations more than five before; also across a checkpoint."""
    steps, model = batches(40), Toy(sparse=True)
    optimizer = build_optimizer(model, SGDConfig("sgd", 0.5))
    average = WeightAverage(model, keep=None)
    perplexities = [9, 8, 7, 8.5, 7.5, 7.2, 9.5, 8.1, 6, 9, 9, 9]
    fires = next(i for i, p in enumerate(perplexities) if i > 5 and p > min(perplexities[: i - 5]))
    seen: list[dict[str, Tensor]] = []
    for number, perplexity in enumerate(perplexities):
        for words_N in steps[3 * number : 3 * number + 3]:
            loss = model.loss(words_N)
            loss.backward()
            optimizer.step(loss.detach(), lr=0.5, num_steps=1)
            average.step()
            if number > fires:
                seen.append({name: value.clone() for name, value in model.state_dict().items()})
        average.record_evaluation(perplexity)
        if number == fires:
            seen.append({name: value.clone() for name, value in model.state_dict().items()})
        assert average.started == (number >= fires)
        copy = WeightAverage(Toy(sparse=True), keep=None)
        copy.load_state_dict(average.state_dict())
        assert copy.state_dict()["evaluations"] == average.state_dict()["evaluations"]
    assert 5 < fires < len(perplexities) - 2
    with average.in_place():
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, torch.stack([weights[name] for weights in seen]).mean(0))
