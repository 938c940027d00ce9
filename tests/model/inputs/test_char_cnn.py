"""Character CNN versus a byte-by-byte reference; caching; OOV words."""

import pytest
import torch
from torch import Tensor

from lm.data.batches import DistinctWords
from lm.model.inputs.char_cnn import CharCNN, CharCNNConfig
from tests.helpers.slow_definitions import TOLERANCES, assert_same

VOCABULARY = ["</s>", "<unk>", "a", "no", "cat", "naïve", "catastrophe", "incomprehensibly"]
SETTINGS = CharCNNConfig("char_cnn", byte_size=3, filters=[2, 3, 4, 2], longest=12)


def make(dtype: torch.dtype = torch.float64) -> CharCNN:
    torch.manual_seed(0)
    return CharCNN(SETTINGS, VOCABULARY, 5).to(dtype)


def by_hand(layer: CharCNN, word: str) -> Tensor:
    spelled = [0xFE, *word.encode()[:12], 0xFF]
    spelled += [0] * (4 - len(spelled))
    letters = [layer.letters.weight[byte] for byte in spelled]
    largest = []
    for size, convolution in enumerate(layer.convolutions, 1):
        places = []
        for place in range(len(letters) - size + 1):
            window = torch.stack(letters[place : place + size], dim=1)
            places.append((convolution.weight * window).sum((1, 2)) + convolution.bias)
        largest.append(torch.stack(places).max(0).values)
    x = torch.cat(largest).clamp(min=0)
    for highway in layer.highways:
        z = highway.both.weight @ x + highway.both.bias
        gate = 1 / (1 + (-z[11:]).exp())
        x = gate * z[:11].clamp(min=0) + (1 - gate) * x
    return layer.projection.weight @ x + layer.projection.bias


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_outputs_and_gradients_match_reference(dtype: torch.dtype) -> None:
    """Includes one-letter words, two-byte letters and a truncated word."""
    layer = make(dtype)
    words = torch.tensor([[2, 7, 5], [0, 2, 6]])
    distinct_U, inverse = torch.unique(words, return_inverse=True)
    found = layer(words, DistinctWords(distinct_U, inverse, layer.plan(distinct_U)))
    expected = torch.stack([by_hand(layer, VOCABULARY[word]) for word in words.flatten()]).view(2, 3, 5)
    weight, parameters = torch.randn(found.shape, dtype=dtype), list(layer.parameters())
    ours, theirs = (torch.autograd.grad((weight * x).sum(), parameters) for x in (found, expected))
    assert_same([found.detach(), *ours], [expected.detach(), *theirs], dtype=dtype)


def test_vector_is_independent_of_other_words() -> None:
    layer = make()
    alone, beside = torch.tensor([4]), torch.tensor([4, 7])
    distinct = [DistinctWords(words, torch.arange(len(words)), layer.plan(words)) for words in (alone, beside)]
    vectors = [layer(each.words_U, each)[0] for each in distinct]
    torch.testing.assert_close(*vectors)


def test_evaluation_caches_vectors_until_training() -> None:
    layer = make().eval()
    counted: list[int] = []
    compute = layer.vectors
    layer.vectors = lambda spelling: counted.append(len(spelling)) or compute(spelling)  # type: ignore
    words = torch.tensor([[4, 4, 6], [2, 6, 4]])
    with torch.no_grad():
        first = layer(words)
        layer(torch.tensor([6, 2]))
        assert counted == [3]
        layer.projection.bias += 1
        layer.train()
        torch.testing.assert_close(layer.eval()(words), first + 1)
        assert counted == [3, 3]


def test_oov_words_have_vectors() -> None:
    layer = make().eval()
    ids = layer.ids_of_unseen(["dog", "unforeseeably-long", "dog"])
    assert ids == [8, 9, 8]
    assert layer.ids_of_unseen(["dog", "cats"]) == [8, 10]
    with torch.no_grad():
        found = layer(torch.tensor([8, 4, 9, 10]))
    expected = [by_hand(layer, word) for word in ("dog", "cat", "unforeseeably-long", "cats")]
    torch.testing.assert_close(found, torch.stack(expected))
