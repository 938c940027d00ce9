"""Every layer on the meta device, in bfloat16, with ignored tokens and with wrong targets."""

import pytest
import torch

from lm.output.base import build_output
from lm.system.errors import UserError
from tests.helpers.layers import NAMES, config_of, gradients, make_layer, zipf_counts


@pytest.mark.parametrize("name", NAMES)
def test_layers_build_on_meta_device(name):
    with torch.device("meta"):
        laid_out = make_layer(name)
    shapes = {key: t.shape for key, t in make_layer(name).state_dict().items()}
    assert {key: t.shape for key, t in laid_out.state_dict().items()} == shapes


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_autocast_is_within_one_percent(name):
    layer = make_layer(name, width=64, vocab_size=300, cutoffs=(50, 150), dtype=torch.float32)
    hidden, targets = torch.randn(64, 64), torch.randint(300, (64,))
    plan = layer.plan(targets)
    with torch.no_grad():
        exact = layer.loss(hidden, targets, plan)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = hidden.bfloat16().requires_grad_()
        loss = layer.loss(narrow, targets, plan)
        nll = layer.nll(hidden, targets)
    loss.backward()
    assert abs(loss - exact) < 0.01 * exact
    assert abs(nll.mean() - layer.nll(hidden, targets).mean()) < 0.01 * nll.mean()
    assert narrow.grad.dtype == torch.bfloat16 and narrow.grad.isfinite().all()
    assert all(g.dtype == torch.float32 for g in gradients(layer).values())


@pytest.mark.parametrize("name", NAMES)
def test_ignored_tokens_do_not_affect_results(name):
    layer = make_layer(name).eval()
    hidden, targets = torch.randn(9, 16, dtype=torch.float64), torch.randint(40, (9,))
    seed = torch.Generator().manual_seed
    alone = layer.loss(hidden, targets, layer.plan(targets, generator=seed(3)))
    padded_hidden = torch.cat([hidden, torch.full((4, 16), torch.nan, dtype=torch.float64)])
    padded = torch.cat([targets, torch.full((4,), -100)])
    loss = layer.loss(padded_hidden, padded, layer.plan(padded, generator=seed(3)))
    torch.testing.assert_close(loss, alone, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", [-1, 40, 10**6])
def test_targets_outside_vocabulary_raise(name, wrong):
    layer = make_layer(name)
    with pytest.raises(UserError, match=rf"vocabulary size \(40\).*got {wrong}\."):
        layer.plan(torch.tensor([0, wrong]))


@pytest.mark.parametrize("name", NAMES)
def test_initialization_is_seeded_and_scaled_by_fan_in(name):
    def fresh(seed):
        torch.manual_seed(seed)
        return build_output(config_of(name, cutoffs=[10, 25]), width=16, counts=zipf_counts(40))

    first, same, other = fresh(1), fresh(1), fresh(2)
    for (key, a), b, c in zip(first.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), key
        if a.dim() == 2:
            assert not torch.equal(a, c), key
            bound = a.shape[1] ** -0.5
            assert a.abs().max() <= bound and a.abs().max() > 0.8 * bound, key
