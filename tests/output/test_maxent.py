"""N-gram weights versus a plain dictionary, without hashing, slices or rows.

The dictionary holds a vector for every (history, softmax) pair. Its values are written to the positions where the layer
reads them, in a weight vector long enough that no two slices overlap (this is checked).
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from lm.config.groups import MaxEntConfig
from lm.data.batches import Streams
from lm.data.corpus import open_corpus
from lm.model.base import Core
from lm.model.language_model import LanguageModel, build_model
from lm.model.predictor import HiddenPredictions
from lm.output.base import OutputLayer
from lm.output.maxent import NO_WORD, MaxEnt, NgramContexts
from lm.system.errors import UserError
from lm.training.restore import _rows
from lm.training.setup import training_streams
from tests.conftest import Tiny
from tests.helpers.definitions import log_distribution
from tests.helpers.layers import make_layer
from tests.helpers.models import VOCABULARY
from tests.helpers.training import losses_of, make_trainer

History = tuple[int, ...]
ORDER, SIZE = 3, 1 << 22
NAMES = ["full", "hsm_freq", "hsm_sim", "adaptive", "adaptive_leaf", "adaptive_bias"]


class IdentityCore(Core):
    """Passes hidden states through."""

    def forward(self, input_TBE, state, masks):
        return input_TBE, state

    def initial_state(self, num_streams, *, device):
        return []


def model_with_ngrams(name: str) -> LanguageModel:
    """Build a model without an input, whose core passes hidden states through."""
    layer = make_layer(name)
    sizes = {"vocab_size": layer.vocab_size, "largest_softmax": layer.vocab_size}
    maxent = MaxEnt(MaxEntConfig(ORDER, SIZE), unk_id=1, **sizes).double()
    return LanguageModel(None, IdentityCore(), layer, maxent)  # type: ignore[arg-type]


def histories(words_PB: list[list[int]], *, step: int, stream: int) -> list[History]:
    """Return the histories of length 0, 1, 2 and so on at a step of the batch."""
    read = [words[stream] for words in words_PB[: ORDER - 1 + step + 1]]
    return [tuple(read[len(read) - length :]) for length in range(ORDER)]


class Dictionary:
    """A vector for each history and softmax, created on first access."""

    def __init__(self, model: LanguageModel) -> None:
        assert model.maxent is not None
        layer, self.maxent, self.vectors = model.output, model.maxent, dict[tuple[History, int], Tensor]()
        clusters = getattr(layer, "cluster_sizes", [])
        self.sizes = [getattr(layer, "shortlist", layer.vocab_size) + len(clusters), *clusters]

    def added(self, before: list[History]) -> Callable[[int], Tensor]:
        return lambda softmax: sum((self[history, softmax] for history in before), torch.zeros(()))

    def __getitem__(self, key: tuple[History, int]) -> Tensor:
        if key not in self.vectors:
            generator = torch.Generator().manual_seed(len(self.vectors))
            vector = torch.randn(self.sizes[key[1]], dtype=torch.float64, generator=generator)
            self.vectors[key] = vector.requires_grad_()
        return self.vectors[key]

    def places(self) -> dict[tuple[History, int], slice]:
        """Return the layer's slice for each vector; no two overlap."""
        maxent, found = self.maxent, {}
        for history, softmax in self.vectors:
            words = [NO_WORD] * (ORDER - len(history)) + list(history)
            context_O = maxent.contexts(torch.tensor(words)[:, None])[-1, 0, len(history)]
            size = self.sizes[softmax]
            start = int(NgramContexts(maxent, context_O.view(1, 1)).of_softmax(softmax, size).start_NO)
            found[history, softmax] = slice(start, start + size)
        ordered = sorted(found.values(), key=lambda place: place.start)
        assert all(one.stop <= other.start for one, other in pairwise(ordered)), "the test needs a longer vector"
        return found

    def write(self) -> None:
        with torch.no_grad():
            for key, place in self.places().items():
                self.maxent.table.weight.view(-1)[place] = self.vectors[key]


def batch(steps: int = 4, streams: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Return words with preceding history, partly before the text; targets, one ignored; and hidden states."""
    generator = torch.Generator().manual_seed(1)
    words_PB = torch.randint(0, 6, (ORDER - 1 + steps, streams), generator=generator)
    words_PB[:2, 0] = words_PB[0, 1] = NO_WORD
    targets_TB = torch.randint(0, 40, (steps, streams), generator=generator)
    targets_TB[1, 2] = -100
    return words_PB, targets_TB, torch.randn(steps, streams, 16, dtype=torch.float64, generator=generator)


def slow_log_probs(layer: OutputLayer, words_PB: Tensor, hidden_TBD: Tensor, dictionary: Dictionary) -> Tensor:
    steps, streams = hidden_TBD.shape[:2]
    rows = [
        log_distribution(layer, hidden_TBD[t, b], dictionary.added(histories(words_PB.tolist(), step=t, stream=b)))
        for t in range(steps)
        for b in range(streams)
    ]
    return torch.stack(rows).view(steps, streams, -1)


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_match_dictionary(name: str) -> None:
    model = model_with_ngrams(name).train()
    layer, maxent = model.output, model.maxent
    dictionary, (words_PB, targets_TB, hidden_TBD) = Dictionary(model), batch()
    hidden_TBD.requires_grad_()
    log_probs = slow_log_probs(layer, words_PB, hidden_TBD, dictionary)
    scored = targets_TB != -100
    expected = -log_probs.gather(-1, targets_TB.clamp(min=0)[..., None])[..., 0][scored].mean()
    dense = [p for p in layer.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(
        3 * expected, [*dense, hidden_TBD, *dictionary.vectors.values()], allow_unused=True, materialize_grads=True
    )
    dictionary.write()
    (plan,) = model.plan_output(targets_TB, [slice(0, 3)], words_PB=words_PB, generator=torch.Generator())
    (loss,), _ = model.loss(hidden_TBD, targets_TB, [], plan=plan)
    (3 * loss).backward()
    torch.testing.assert_close(loss, expected)
    found = [*(p.grad for p in dense), hidden_TBD.grad]
    for ours, theirs in zip(found, wanted[: len(found)], strict=True):
        torch.testing.assert_close(ours, theirs)
    used = maxent.table.take_used()
    whole = torch.zeros_like(maxent.table.weight).index_copy(0, used.rows_U, used.values.grad).view(-1)
    for place, theirs in zip(dictionary.places().values(), wanted[len(found) :], strict=True):
        torch.testing.assert_close(whole[place], theirs)
        whole[place] = 0
    assert not whole.any(), "no other weight has a gradient"


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_likelihoods_match_dictionary(name: str) -> None:
    model = model_with_ngrams(name).eval()
    layer, maxent = model.output, model.maxent
    dictionary, (words_PB, targets_TB, hidden_TBD) = Dictionary(model), batch()
    expected = slow_log_probs(layer, words_PB, hidden_TBD, dictionary)
    dictionary.write()
    predictions = HiddenPredictions(hidden_TBD, layer, NgramContexts(maxent, maxent.contexts(words_PB)))
    torch.testing.assert_close(predictions.log_prob(), expected)
    assert expected.logsumexp(-1).abs().max() < 1e-10
    picked = -expected.gather(-1, targets_TB.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(predictions.nll(targets_TB), picked.masked_fill(targets_TB == -100, 0))
    for ours, theirs in zip(predictions.topk(7), expected.topk(7), strict=True):
        torch.testing.assert_close(ours, theirs)
    steps_N, streams_N = torch.tensor([0, 3, 2]), torch.tensor([2, 0, 1])
    some, uniform_N = predictions.at(steps_N, streams_N), torch.tensor([0.1, 0.5, 0.99], dtype=torch.float64)
    torch.testing.assert_close(some.log_prob(), expected[steps_N, streams_N])
    cumulative = expected[steps_N, streams_N].exp().cumsum(-1)
    assert some.sample(uniform_N).tolist() == (cumulative > uniform_N[:, None]).long().argmax(-1).tolist()


MAXENT = [f"model.maxent.order={ORDER}", f"model.maxent.size={SIZE}"]


def fill(maxent: MaxEnt) -> None:
    with torch.no_grad():
        maxent.table.weight.normal_(generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("output", ["output=full", "output=hsm_freq"])
def test_training_and_evaluation_use_same_histories(tiny: Tiny, output: str) -> None:
    """Checks boundaries between batches and epochs, where a stream returns to its start."""
    config = tiny(*MAXENT, output, "model.dropout=0", "optim.lr=1e-30", "trainer.bptt=1")
    config.data.tokens, config.trainer.batch_size = 1000, 100
    corpus = open_corpus(config.data)
    trainer, _ = make_trainer(config, corpus, num_batches=0)
    fill(trainer.model.maxent)
    epoch = trainer.streams.steps_per_epoch
    batches = make_trainer(config, corpus, num_batches=epoch + 4)[1]
    losses = losses_of(trainer, batches)
    model, expected = trainer.model.eval(), []
    state = model.initial_state(config.trainer.batch_size)
    with torch.no_grad():
        for read in batches:
            predictions, state = model.read(read.inputs_TB, state)
            expected.append(predictions.nll(read.targets_TB).mean().item())
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_reading_in_chunks_matches_one_pass(tiny: Tiny) -> None:
    """Also, an OOV word known only to the input is `<unk>` to the n-grams."""
    model = build_model(tiny(*MAXENT, "output=hsm_freq"), VOCABULARY).eval()
    fill(model.maxent)
    words_TB = torch.randint(0, len(VOCABULARY), (9, 2), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, end = model.read(words_TB, model.initial_state(2))
        state, parts = model.initial_state(2), []
        for piece in words_TB.split([1, 3, 1, 4]):
            predictions, state = model.read(piece, state)
            parts.append(predictions.log_prob())
    torch.testing.assert_close(torch.cat(parts), whole.log_prob())
    assert torch.equal(state["words"], end["words"]) and state["words"].shape == (ORDER - 1, 2)
    contexts, unk = model.maxent.contexts, VOCABULARY.unk_id
    unseen_TB = words_TB.masked_fill(words_TB == unk, len(VOCABULARY) + 5)
    assert torch.equal(contexts(unseen_TB), contexts(words_TB))


def test_hashes_are_uniform() -> None:
    """Slice starts cover the whole vector, with no more collisions than by chance."""
    maxent = MaxEnt(MaxEntConfig(2, 1 << 20), vocab_size=10_000, unk_id=1, largest_softmax=100)
    contexts_NO = maxent.contexts(torch.arange(10_000).repeat(2, 1))[0]
    starts = torch.cat([NgramContexts(maxent, contexts_NO).of_softmax(c, 100).start_NO[:, 1] for c in range(10)])
    distinct = len(torch.unique(starts))
    expected = maxent.size * -np.expm1(-len(starts) / maxent.size)
    assert distinct == pytest.approx(expected, rel=0.005)
    shares = torch.histc(starts.double(), bins=16, min=0, max=maxent.size) / len(starts)
    assert (shares * 16 - 1).abs().max() < 0.03


def test_size_below_largest_softmax_raises(tiny: Tiny) -> None:
    with pytest.raises(UserError, match=r"model\.maxent\.size must .*11.*; got 10\. Try model\.maxent\.size="):
        build_model(tiny("model.maxent.order=2", "model.maxent.size=10"), VOCABULARY)
    assert build_model(tiny("model.maxent.order=2", "model.maxent.size=11"), VOCABULARY).maxent is not None
    assert build_model(tiny("model.maxent.order=0"), VOCABULARY).maxent is None


def test_ngram_weights_cannot_map_to_another_vocabulary(tiny: Tiny) -> None:
    assert _rows(build_model(tiny(*MAXENT), VOCABULARY)) is None
    assert _rows(build_model(tiny(), VOCABULARY)) is not None


def test_read_before_returns_previous_inputs(tiny: Tiny) -> None:
    config = tiny("trainer.bptt=4", "data.tokens=1000", "trainer.batch_size=90")
    streams: Streams = training_streams(config, open_corpus(config.data))
    read = np.full((7, 90), -1)
    for step in range(3 * streams.steps_per_epoch):
        for count in (0, 1, 7):
            assert np.array_equal(streams.read_before(step, count), read[len(read) - count :])
        read = np.concatenate([read, streams.read(step)[0]])
