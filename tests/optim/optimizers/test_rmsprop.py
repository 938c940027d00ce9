"""RMSprop against torch's where all words are used, and a plain loop where they are not."""

import pytest
import torch
from torch import Tensor

from lm.config.groups import EmbeddingUpdate
from lm.optim.optimizers.decoupled import RMSpropConfig
from tests.helpers.toy_model import Toy, batches, loss_of, train


def test_the_dense_form_is_that_of_torch() -> None:
    config = RMSpropConfig("rmsprop", 0.01, max_grad_norm=None, embedding=EmbeddingUpdate.dense)
    ours, theirs = train(config, num_steps=50, rate=lambda _: 0.01), Toy(sparse=False)
    optimizer = torch.optim.RMSprop(theirs.parameters(), lr=0.01, alpha=0.99, eps=1e-8)
    for words_N in batches(50):
        optimizer.zero_grad()
        theirs.loss(words_N).backward()
        optimizer.step()
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("by_word", [False, True])
def test_a_row_keeps_its_mean_square_while_it_is_idle(by_word: bool) -> None:
    form = EmbeddingUpdate.rowwise if by_word else EmbeddingUpdate.sparse
    config = RMSpropConfig("rmsprop", 0.01, max_grad_norm=None, weight_decay=0.1, embedding=form)
    ours, reference = train(config, num_steps=50, rate=lambda _: 0.01), Toy(sparse=False).double()
    squares: dict[int, Tensor] = {}
    map_square = torch.zeros_like(reference.map.weight)
    for words_N in batches(50):
        reference.zero_grad()
        loss_of(reference.map(reference.input(words_N)), words_N).backward()
        with torch.no_grad():
            reference.input.weight *= 1 - 0.01 * 0.1
            reference.map.weight *= 1 - 0.01 * 0.1
            for word in set(words_N.tolist()):
                gradient = reference.input.weight.grad[word]
                square = gradient.square().mean() if by_word else gradient.square()
                squares[word] = 0.99 * squares.get(word, 0) + 0.01 * square
                reference.input.weight[word] -= 0.01 * gradient / (squares[word].sqrt() + 1e-8)
            map_square = 0.99 * map_square + 0.01 * reference.map.weight.grad.square()
            reference.map.weight -= 0.01 * reference.map.weight.grad / (map_square.sqrt() + 1e-8)
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value.double(), reference.state_dict()[name], rtol=0, atol=1e-5)
