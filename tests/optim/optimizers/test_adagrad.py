"""Adagrad with Adam for the core: versus torch's two optimizers."""

from dataclasses import replace

import pytest
import torch

from lm.optim.optimizers.adagrad import ACCUMULATOR_START, EPSILON, AdagradAdamConfig
from tests.helpers.toy_model import Toy, batches, train

CONFIG = AdagradAdamConfig(lr=0.1, core_lr=0.01, core_weight_decay=0.1, weight_decay=0.0, max_grad_norm=None)


def test_core_follows_adam_and_the_table_follows_adagrad() -> None:
    def share(step: int) -> float:
        return 1 - step / 150

    model = train(replace(CONFIG, embedding="dense"), num_steps=100, rate=lambda step: CONFIG.lr * share(step))
    theirs = Toy(sparse=False)
    adam = torch.optim.AdamW(theirs.core.parameters(), weight_decay=0.1)
    adagrad = torch.optim.Adagrad(theirs.input.parameters(), initial_accumulator_value=ACCUMULATOR_START, eps=EPSILON)
    for step, words_N in enumerate(batches(100)):
        theirs.loss(words_N).backward()
        for optimizer, lr in ((adam, CONFIG.core_lr), (adagrad, CONFIG.lr)):
            optimizer.param_groups[0]["lr"] = lr * share(step)
            optimizer.step()
            optimizer.zero_grad()
    assert not torch.equal(model.core.weight, Toy(sparse=False).core.weight)
    torch.testing.assert_close(model.core.weight, theirs.core.weight, rtol=0, atol=1e-5)
    torch.testing.assert_close(model.input.weight, theirs.input.weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", ["sparse", "rowwise"])
def test_tables_are_updated_as_by_adagrad(form: str) -> None:
    """With a core that does not move, the sparse table moves as with `optim=adagrad`."""
    still = replace(CONFIG, embedding=form, core_lr=1e-30, core_weight_decay=0.0)
    model = train(still, num_steps=50)
    assert torch.equal(model.core.weight, Toy(sparse=True).core.weight)
    assert not torch.equal(model.input.weight, Toy(sparse=True).input.weight)
