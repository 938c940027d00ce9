"""Adaptive input versus a reference; tied weights versus one table used twice."""

import numpy as np
import pytest
import torch
from torch import Tensor

from lm.data.batches import DistinctWords
from lm.data.corpus import open_corpus
from lm.model.inputs.adaptive import AdaptiveInput, automatic_cutoffs
from lm.model.language_model import build_model
from lm.model.regularization import DropoutMasks
from lm.system.errors import UserError
from tests.conftest import Tiny
from tests.helpers.slow_definitions import TOLERANCES, assert_same
from tests.helpers.training import make_trainer

WORDS = torch.tensor([[3, 0, 29, 3], [11, 12, 4, 29], [0, 3, 5, 10]])


def by_hand(layer: AdaptiveInput, words: Tensor) -> Tensor:
    """Reference: look up each word in its cluster's table and apply that cluster's projection."""
    vectors = []
    for word in words.flatten().tolist():
        cluster = sum(word >= cutoff for cutoff in layer.cutoffs)
        row = layer.tables[cluster].weight[word - [0, *layer.cutoffs][cluster]]
        vectors.append(row if cluster == 0 else layer.projections[cluster - 1] @ row)
    return torch.stack(vectors).view(*words.shape, -1)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("cutoffs", [[], [4], [4, 12], [4, 12, 25]])
def test_outputs_and_gradients_match_reference(cutoffs: list[int], dtype: torch.dtype) -> None:
    """With and without a plan. Clusters without words get zero gradients."""
    torch.manual_seed(0)
    layer = AdaptiveInput(width=16, vocab_size=30, cutoffs=cutoffs, sparse=True).to(dtype)
    assert layer.widths == [16, 4, 4, 4][: len(cutoffs) + 1]
    distinct_U, inverse = torch.unique(WORDS, return_inverse=True)
    found = layer(WORDS, DistinctWords(distinct_U, inverse, layer.plan(distinct_U)))
    weight = torch.randn(found.shape, dtype=dtype)
    (weight * found).sum().backward()
    gradients = [p.grad for p in layer.projections]
    for table in layer.tables:
        used = table.take_used()
        gradients.append(torch.zeros_like(table.weight).index_add(0, used.rows_U, used.values.grad))
        table.weight.requires_grad_()
    expected = by_hand(layer, WORDS)
    wanted = [*layer.projections, *(table.weight for table in layer.tables)]
    expected_gradients = torch.autograd.grad((weight * expected).sum(), wanted, materialize_grads=True)
    assert_same([found.detach(), *gradients], [expected.detach(), *expected_gradients], dtype=dtype)
    assert_same([layer.eval()(WORDS).detach()], [expected.detach()], dtype=dtype)


def test_all_clusters_start_at_same_scale() -> None:
    torch.manual_seed(0)
    layer = AdaptiveInput(width=64, vocab_size=3000, cutoffs=[1000, 2000]).eval()
    with torch.no_grad():
        sizes = [layer(torch.arange(start, start + 1000)).std().item() for start in (0, 1000, 2000)]
    assert sizes == pytest.approx([0.1 / 3**0.5] * 3, rel=0.15)


def test_each_automatic_cutoff_leaves_a_quarter_of_tokens() -> None:
    counts = np.array([64] * 12 + [16] * 12 + [4] * 12 + [1] * 16)
    cutoffs = automatic_cutoffs(counts)
    total = counts.sum()
    for cutoff, left in zip(cutoffs, (1 / 4, 1 / 16, 1 / 64), strict=True):
        assert counts[cutoff:].sum() <= left * total < counts[cutoff - 1 :].sum()
    assert automatic_cutoffs(np.array([5])) == []


def test_adaptive_input_is_20_times_smaller_than_a_table() -> None:
    with torch.device("meta"):
        layer = AdaptiveInput(width=256, vocab_size=793_470, cutoffs=[4000, 40_000, 200_000])
    assert sum(p.numel() for p in layer.parameters()) < 793_470 * 256 / 20


TIED = {
    "full": "output=full model.tie=true model.embedding_size=32 model.hidden_size=32",
    "projected": "output=full model.tie=true model.embedding_size=32 model.hidden_size=48 model.projection=32",
    "adaptive": """output=adaptive output.cutoffs=[10,20] input=adaptive model.tie=true model.embedding_size=32
        model.hidden_size=32""",
}


@pytest.mark.parametrize("form", TIED)
@pytest.mark.parametrize("groups", [1, 3])
def test_tied_table_sums_gradients_of_both_uses(tiny: Tiny, form: str, groups: int) -> None:
    """The optimizer sees the sum of the gradients from both uses."""
    config = tiny(*TIED[form].split(), "model.dropout=0", f"trainer.micro_batches={groups}")
    corpus = open_corpus(config.data)
    trainer, (batch, *_) = make_trainer(config, corpus)
    model = trainer.model
    names = [name for name, _ in model.named_parameters()]
    assert not any(name.startswith("input.tables") or name == "input.weight" for name in names)
    assert list(model.state_dict()) == names, "a checkpoint holds it once"
    assert len(trainer.optimizer.dense) == len(names)
    trainer.forward_backward(batch, trainer.state, DropoutMasks(1, 0, 4, slice(0, 4)))
    tables = model.output.word_vectors()
    found = [table.grad.clone() for table in tables]

    # Separate the two uses by detaching the input vectors, then the output vectors.
    copies = [table.detach().clone() for table in tables]
    for table in tables:
        table.grad = None
    model.input.shared = model.input.word_vectors = lambda: copies

    def loss() -> Tensor:
        plan = model.output.plan(batch.targets_TB)
        (loss,), _ = model.loss(model.input(batch.inputs_TB), batch.targets_TB, model.initial_state(4), plan=plan)
        return loss

    loss().backward()
    from_output = [table.grad for table in tables]
    copies = [table.detach().clone().requires_grad_() for table in tables]
    from_input = torch.autograd.grad(loss(), copies)
    expected = [a + b for a, b in zip(from_output, from_input, strict=True)]
    assert all(grad.any() for grad in from_input)
    assert_same(found, expected, dtype=torch.float32)


def test_cutoffs_beyond_vocabulary_raise(tiny: Tiny) -> None:
    config = tiny("input=adaptive", "input.cutoffs=[5,500]")
    with pytest.raises(UserError, match=r"input.cutoffs must increase.*below the vocabulary.*Try input.cutoffs=\[5\]"):
        build_model(config, open_corpus(config.data).vocabulary)
