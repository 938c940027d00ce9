"""Gradient descent against torch's where all words are used, and a plain loop where they are not."""

import pytest
import torch
from torch import Tensor

from lm.config.groups import EmbeddingUpdate
from lm.optim.optimizers.decoupled import SGDConfig
from tests.helpers.toy_model import Toy, batches, loss_of, train


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_dense_form_is_that_of_torch(momentum: float) -> None:
    config = SGDConfig(
        "sgd", 0.5, max_grad_norm=None, momentum=momentum, embedding=EmbeddingUpdate.dense, weight_decay=0.0
    )
    ours, theirs = train(config, num_steps=50, rate=lambda _: 0.5), Toy(sparse=False)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.5, momentum=momentum)
    for words_N in batches(50):
        optimizer.zero_grad()
        theirs.loss(words_N).backward()
        optimizer.step()
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[name])


def test_a_row_keeps_its_velocity_while_it_is_idle() -> None:
    config = SGDConfig("sgd", 0.5, max_grad_norm=None, momentum=0.9, weight_decay=0.1)
    ours, reference = train(config, num_steps=50, rate=lambda _: 0.5), Toy(sparse=False)
    velocity: dict[object, Tensor] = {}
    for words_N in batches(50):
        reference.zero_grad()
        loss_of(reference.map(reference.input(words_N)), words_N).backward()
        with torch.no_grad():
            reference.input.weight *= 1 - 0.5 * 0.1
            reference.map.weight *= 1 - 0.5 * 0.1
            for word in set(words_N.tolist()):
                velocity[word] = 0.9 * velocity.get(word, 0) + reference.input.weight.grad[word]
                reference.input.weight[word] -= 0.5 * velocity[word]
            velocity["map"] = 0.9 * velocity.get("map", 0) + reference.map.weight.grad
            reference.map.weight -= 0.5 * velocity["map"]
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-5, atol=1e-7)


def test_one_second_moment_per_word_is_refused() -> None:
    (problem,) = SGDConfig("sgd", 0.5, embedding=EmbeddingUpdate.rowwise).problems()
    assert "optim.embedding=sparse" in problem
