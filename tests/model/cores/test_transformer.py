"""The Transformer versus attention written as loops over positions, in one pass and in segments."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lm.config.schema import TrainConfig
from lm.data.corpus import open_corpus
from lm.model.cores.transformer import Block, Transformer, TransformerConfig
from lm.model.language_model import build_model
from lm.model.scoring import token_nll
from lm.system.tree import map_leaves
from tests.helpers.models import VOCABULARY, log_distributions, reading, score_tokens
from tests.helpers.slow_definitions import assert_same, values_and_gradients
from tests.helpers.training import losses_of, make_trainer

CPU = torch.device("cpu")
T, B, E, D = 9, 2, 6, 8


def make_core(memory: int, *, width: int = E, layers: int = 2) -> Transformer:
    torch.manual_seed(1)
    settings = {"layers": layers, "heads": 2, "memory": memory}
    core = Transformer(TransformerConfig("transformer", width, D, 0.0, **settings))  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in core.parameters():
            parameter.add_(torch.randn_like(parameter) / 5)
    return core


def layer_norm(x_D: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
    centered_D = x_D - x_D.mean()
    return centered_D / (centered_D.square().mean() + 1e-5).sqrt() * norm.weight + norm.bias


def rotated(x_W: Tensor, position: int) -> Tensor:
    """Multiply each pair of the two halves, as a complex number, by e^(i position / 10000^(j / pairs))."""
    pairs = len(x_W) // 2
    turned = [
        torch.complex(x_W[j], x_W[pairs + j])
        * torch.polar(torch.ones_like(x_W[j]), torch.tensor(position * 10_000 ** (-j / pairs), dtype=x_W.dtype))
        for j in range(pairs)
    ]
    return torch.stack([z.real for z in turned] + [z.imag for z in turned])


def attended_by_hand(block: Block, inputs: list[Tensor], t: int, memory: int) -> Tensor:
    """Attend from position t of one stream to itself and the `memory` positions before it."""
    seen, outputs = range(max(0, t - memory), t + 1), []
    normed = {s: layer_norm(inputs[s], block.norm) for s in seen}
    head_width = D // block.heads
    for head in range(block.heads):
        part = slice(head * head_width, (head + 1) * head_width)
        query = rotated((block.query.weight @ normed[t])[part], t)
        keys = [rotated((block.key_value.weight[:D] @ normed[s])[part], s) for s in seen]
        weights = torch.stack([(query * key).sum() / math.sqrt(head_width) for key in keys]).exp()
        values = [(block.key_value.weight[D:] @ normed[s])[part] for s in seen]
        outputs.append(sum(w * v for w, v in zip(weights / weights.sum(), values, strict=True)))
    return block.attended.weight @ torch.cat(outputs)  # type: ignore[arg-type]


def banded_pass(core: Transformer, input_TBE: Tensor) -> Tensor:
    """Read the whole text in one pass under the band mask, one stream and position at a time."""
    streams = []
    for stream in range(input_TBE.size(1)):
        hidden = list(core.input(input_TBE[:, stream]))
        for block in core.blocks:
            assert isinstance(block, Block)
            attended = [attended_by_hand(block, hidden, t, core.config.memory) for t in range(len(hidden))]
            hidden = [h + a for h, a in zip(hidden, attended, strict=True)]
            normed = [layer_norm(h, block.feedforward_norm) for h in hidden]
            hidden = [
                h + block.narrow.weight @ (block.wide.weight @ n).clamp(min=0)
                for h, n in zip(hidden, normed, strict=True)
            ]
        streams.append(torch.stack([layer_norm(h, core.norm) for h in hidden]))
    return torch.stack(streams, 1)


@pytest.mark.parametrize(("memory", "width"), [(3, E), (12, D)])
def test_one_pass_and_gradients_match_reference(memory: int, width: int) -> None:
    """The core's angles are float32, so float64 would not be closer."""
    core = make_core(memory, width=width)
    input_TBE = torch.randn(T, B, width, requires_grad=True)
    wanted = [input_TBE, *core.parameters()]
    found = values_and_gradients(core(input_TBE, core.initial_state(B, device=CPU), None)[0], [], wanted)
    expected = values_and_gradients(banded_pass(core, input_TBE), [], wanted)
    assert_same(found, expected, dtype=torch.float32)


@pytest.mark.parametrize("memory", [1, 3, 12])
def test_segments_with_memory_equal_banded_pass(memory: int) -> None:
    """Segments are shorter and longer than the memory, which is first empty, then partly filled, then full."""
    core = make_core(memory)
    input_TBE = torch.randn(T, B, E)
    expected_TBD = banded_pass(core, input_TBE)
    for lengths in ([1] * T, [4, 4, 1], [7, 2], [2, 7]):
        state, parts = core.initial_state(B, device=CPU), []
        for segment_TBE in input_TBE.split(lengths):
            hidden_TBD, state = core(segment_TBE, state, None)
            parts.append(hidden_TBD)
        torch.testing.assert_close(torch.cat(parts), expected_TBD, rtol=0, atol=1e-5)
        assert [t.shape for t in state["memories"]] == [(memory, B, D)] * 2


def test_hidden_state_depends_on_layers_times_memory_words_and_no_more() -> None:
    core = make_core(2, layers=2)
    input_TBE = torch.randn(T, B, E, requires_grad=True)
    (gradient_TBE,) = torch.autograd.grad(
        core(input_TBE, core.initial_state(B, device=CPU), None)[0][7, 0].sum(), input_TBE
    )
    depends_TB = gradient_TBE.abs().sum(-1) > 0
    assert depends_TB[:, 0].nonzero().flatten().tolist() == [3, 4, 5, 6, 7] and not depends_TB[:, 1].any()


def test_no_gradient_flows_into_memory() -> None:
    core = make_core(4)
    input_TBE = torch.randn(T, B, E, requires_grad=True)
    _, state = core(input_TBE[:6], core.initial_state(B, device=CPU), None)
    hidden_TBD, _ = core(input_TBE[6:], state, None)
    (gradient_TBE,) = torch.autograd.grad(hidden_TBD.sum(), input_TBE)
    assert gradient_TBE[6:].abs().sum() > 0 and not gradient_TBE[:6].any()


def test_streams_with_different_histories_share_a_batch() -> None:
    """A stream that starts later attends to nothing before its start."""
    core = make_core(5)
    input_TBE = torch.randn(T, B, E)
    _, early = core(input_TBE[:4, :1], map_leaves(lambda t: t[:, :1], core.initial_state(B, device=CPU)), None)
    state = map_leaves(lambda old, new: torch.cat([old, new[:, 1:]], 1), early, core.initial_state(B, device=CPU))
    hidden_TBD, _ = core(input_TBE[4:], state, None)
    torch.testing.assert_close(hidden_TBD[:, 0], banded_pass(core, input_TBE)[4:, 0])
    torch.testing.assert_close(hidden_TBD[:, 1], banded_pass(core, input_TBE[4:])[:, 1])


SMALL = ["model=transformer", "model.embedding_size=16", "model.hidden_size=16", "model.heads=4", "model.memory=3"]
TIED = [*SMALL, "input=adaptive", "model.tie=true", "output=adaptive", "output.cutoffs=[3,7]"]


@pytest.mark.parametrize("way", [SMALL, TIED])
def test_reading_word_by_word_equals_scoring(tiny: Callable[..., TrainConfig], way: list[str]) -> None:
    model = build_model(tiny(*way), VOCABULARY).eval()
    words = torch.randint(len(VOCABULARY), (40,), generator=torch.Generator().manual_seed(1))
    one_by_one = log_distributions(model, words.tolist())
    expected = [-float(log_probs[word]) for log_probs, word in zip(one_by_one, words, strict=False)]
    found = token_nll(model, words.numpy(), **reading())
    assert found == pytest.approx(expected, abs=1e-5)


def test_warm_up_fills_the_memory(tiny: Callable[..., TrainConfig]) -> None:
    """A one-layer model reaches back exactly as far as its memory, so the number of streams changes nothing."""
    config = tiny(*SMALL, "model.layers=1", "model.memory=200")
    model = build_model(config, VOCABULARY)
    tokens = torch.randint(len(VOCABULARY), (1200,), generator=torch.Generator().manual_seed(1)).numpy()
    scores = [score_tokens(model, tokens, streams=streams, batch_size=8).nll for streams in (1, 5)]
    assert model.looks_back == 200 and scores[0] == pytest.approx(scores[1], rel=1e-6)


def test_tied_adaptive_form_learns_a_batch(tiny: Callable[..., TrainConfig]) -> None:
    config = tiny(*TIED, "optim=adam", "optim.lr=0.01")
    trainer, batches = make_trainer(config, open_corpus(config.data), num_batches=1)
    losses = losses_of(trainer, batches * 30)
    assert losses[-1] < losses[0] / 2
