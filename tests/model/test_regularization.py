"""Regularizers of AWD-LSTM against slow definitions."""

import pytest
import torch
from torch import Tensor, nn

from lm.config.groups import ModelConfig
from lm.data.batches import DistinctWords
from lm.data.corpus import open_corpus
from lm.model.cores.recurrent import GRU, IRNN, LSTM, RNN, IRNNConfig, RecurrentConfig, RNNConfig
from lm.model.regularization import DropoutMasks, drop, drop_weights, drop_words, penalties
from tests.conftest import Tiny
from tests.helpers.training import losses_of, make_trainer
from tests.helpers.ways import AWD

MASKS = DropoutMasks(1, 3, 4, slice(0, 4), locked=True)
CORES: list[tuple[type, object]] = [
    (LSTM, RecurrentConfig("lstm", 5, 6, weight_drop=0.5, layers=2)),
    (LSTM, RecurrentConfig("lstm", 5, 6, weight_drop=0.5, projection=4)),
    (GRU, RecurrentConfig("gru", 5, 6, weight_drop=0.5)),
    (RNN, RNNConfig("rnn", 5, 6, weight_drop=0.5)),
    (RNN, RNNConfig("rnn", 5, 6, weight_drop=0.5, nonlinearity="tanh")),
    (IRNN, IRNNConfig("irnn", 5, 6, weight_drop=0.5, identity=0.5)),
]
each_core = pytest.mark.parametrize(("kind", "config"), CORES)


def test_locked_masks_are_constant_over_time_and_differ_between_streams() -> None:
    dropped_TBE = drop(torch.ones(7, 4, 50), MASKS, 0.4, layer="embedding")
    assert (dropped_TBE == dropped_TBE[:1]).all()
    assert len({tuple(stream.tolist()) for stream in dropped_TBE[0]}) == 4
    part_TBE = drop(torch.ones(7, 2, 50), MASKS.of(slice(1, 3)), 0.4, layer="embedding")
    assert torch.equal(part_TBE, dropped_TBE[:, 1:3])


def test_word_dropout_zeroes_every_occurrence_of_a_word() -> None:
    words_TB = torch.randint(0, 30, (12, 4), generator=torch.Generator().manual_seed(1))
    rows_U, inverse_TB = torch.unique(words_TB, return_inverse=True)
    dropped_TBE = drop_words(torch.ones(12, 4, 3), DistinctWords(rows_U, inverse_TB, None), MASKS, 0.5)
    by_word: dict[int, set[float]] = {}
    for word, vector in zip(words_TB.flatten().tolist(), dropped_TBE.flatten(0, 1).tolist(), strict=True):
        by_word.setdefault(word, set()).update(vector)
    assert set(map(len, by_word.values())) == {1}
    assert {value for values in by_word.values() for value in values} == {0.0, 2.0}


def test_penalties_match_loops_over_entries() -> None:
    hidden, dropped = torch.randn(4, 3, 2), torch.randn(4, 3, 2)
    (found,) = penalties(hidden, dropped, ModelConfig("any", activation_penalty=2, change_penalty=3))
    squares = [dropped[t, b, d] ** 2 for t in range(4) for b in range(3) for d in range(2)]
    changes = [(hidden[t + 1, b, d] - hidden[t, b, d]) ** 2 for t in range(3) for b in range(3) for d in range(2)]
    assert found.item() == pytest.approx(2 * float(sum(squares)) / 24 + 3 * float(sum(changes)) / 18, rel=1e-5)
    assert penalties(hidden[:1], dropped[:1], ModelConfig("any", change_penalty=3))[0].item() == 0
    assert penalties(hidden, dropped, ModelConfig("any")) == []


@each_core
def test_weight_drop_matches_layers_with_dropped_weights(kind: type, config: object) -> None:
    """Run torch's own modules with the dropped matrices copied in."""
    torch.manual_seed(1)
    core = kind(config)
    input_TBE, state = torch.randn(6, 4, 5), core.initial_state(4, device=torch.device("cpu"))
    found, _ = core(input_TBE, state, MASKS)
    undropped, _ = core(input_TBE, state, None)
    weights = [layer.get_parameter("weight_hh_l0") for layer in core.layers]
    with torch.no_grad():
        for index, weight in enumerate(weights):
            weight.copy_(drop_weights(weight, MASKS, 0.5, layer=f"layer {index}"))
    expected, _ = core(input_TBE, state, None)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, undropped)


@each_core
def test_weight_drop_gradients_match_finite_differences(kind: type, config: object) -> None:
    torch.manual_seed(1)
    core = kind(config).double()
    input_TBE = torch.randn(3, 4, 5, dtype=torch.float64)
    state = [
        tuple(part.double() for part in layer) if isinstance(layer, tuple) else layer.double()
        for layer in core.initial_state(4, device=torch.device("cpu"))
    ]
    weight = core.layers[0].get_parameter("weight_hh_l0")

    def loss() -> Tensor:
        return core(input_TBE, state, MASKS)[0].square().sum()

    (grad,) = torch.autograd.grad(loss(), weight)
    direction = torch.randn_like(weight)
    with torch.no_grad():
        weight += 1e-5 * direction
        above = loss()
        weight -= 2e-5 * direction
        below = loss()
    assert ((above - below) / 2e-5).item() == pytest.approx((grad * direction).sum().item(), rel=1e-5)


def test_training_keeps_undropped_weights(tiny: Tiny) -> None:
    """After many updates no recurrent weight is zero, and the state dict has one copy of each."""
    config = tiny(*AWD[0].split(), "trainer.bptt=5")
    corpus = open_corpus(config.data)
    trainer, batches = make_trainer(config, corpus, num_batches=20)
    plain, _ = make_trainer(tiny("model.layers=2", "model.embedding_size=16", "model.hidden_size=16"), corpus)
    for _ in range(10):
        losses_of(trainer, batches)
    assert list(trainer.model.state_dict()) == list(plain.model.state_dict())
    for layer in trainer.model.core.layers:
        assert isinstance(layer, nn.LSTM) and layer.weight_hh_l0.all()


def test_penalty_is_logged_but_not_part_of_the_loss(tiny: Tiny) -> None:
    """The first step's loss does not depend on the penalty; later ones do, through the weights."""
    losses = {}
    for weight in (0, 5):
        config = tiny(f"model.activation_penalty={weight}", "model.dropout=0", "trainer.log_every_steps=1")
        trainer, batches = make_trainer(config, open_corpus(config.data))
        losses[weight] = losses_of(trainer, batches)
        metrics = trainer.metrics()
        assert ("train/penalty" in metrics) == (weight > 0)
    assert losses[0][0] == losses[5][0] and losses[0][1:] != losses[5][1:]
