"""Gradients of a step: equal with and without micro-batches, and close in bfloat16."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from lm.config.schema import TrainConfig
from lm.data.batches import groups_of
from lm.data.corpus import open_corpus
from lm.model.regularization import DropoutMasks
from lm.system.errors import UserError
from tests.helpers.training import LAYERS, losses_of, make_trainer

Tiny = Callable[..., TrainConfig]
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


def test_micro_batches_partition_the_streams() -> None:
    for num_streams, number in [(4, 1), (4, 3), (128, 5), (7, 7)]:
        groups = groups_of(num_streams, number)
        assert len(groups) == number and groups[0].start == 0 and groups[-1].stop == num_streams
        assert all(a.stop == b.start for a, b in pairwise(groups))
        sizes = {group.stop - group.start for group in groups}
        assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1


def test_more_micro_batches_than_streams_raise(tiny: Tiny) -> None:
    with pytest.raises(UserError, match=r"trainer.micro_batches must not exceed trainer.batch_size \(4\).*got 5"):
        tiny("trainer.micro_batches=5")


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
