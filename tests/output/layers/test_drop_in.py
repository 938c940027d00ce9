"""The layers as ordinary modules: the adaptive softmax in place of torch's, every layer in a plain training loop."""

import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lm
from lm import AdaptiveSoftmax
from lm.output.base import OutputLayer, build_output
from lm.output.layers.adaptive import AdaptiveConfig
from lm.system.errors import UserError
from tests.conftest import ROOT
from tests.helpers.definitions import log_distribution
from tests.helpers.emulated_cuda import emulated_cuda
from tests.helpers.layers import make_layer, zipf_counts
from tests.helpers.pages import blocks
from tests.helpers.ranks import run_ranks

PAGE = ROOT / "docs/own-model.md"
LAYERS = [name for name in dir(lm) if inspect.isclass(item := getattr(lm, name)) and issubclass(item, OutputLayer)]


def both(**options):
    """Torch's module, and ours with its weights."""
    torch.manual_seed(0)
    theirs = nn.AdaptiveLogSoftmaxWithLoss(32, 60, [10, 30], **options).double()
    ours = AdaptiveSoftmax(32, 60, [10, 30], **{"div_value": 4.0, **options}).double()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.parametrize("options", [{}, {"head_bias": True}, {"div_value": 2.0}, {"div_value": 5.0}])
def test_results_and_gradients_match_torch(options):
    """Tails narrower than 8 included."""
    ours, theirs = both(**options)
    hidden, targets = torch.randn(50, 32, dtype=torch.float64, requires_grad=True), torch.randint(60, (50,))
    pairs = [(dict(ours.named_parameters()), dict(theirs.named_parameters()))]
    names = {a: b for a, b in ours.torch_names().items() if a in pairs[0][0]}
    assert names.keys() == pairs[0][0].keys() and set(names.values()) == pairs[0][1].keys()
    weights = torch.arange(50.0, dtype=torch.float64)
    for objective in (
        lambda result: result.loss,
        lambda result: (result.output * weights).sum(),
        lambda result: 3 * result.loss + (result.output * weights).sum(),
    ):
        results = ours(hidden, targets), theirs(hidden, targets)
        torch.testing.assert_close(*map(tuple, results))
        mine = torch.autograd.grad(objective(results[0]), [hidden, *(pairs[0][0][name] for name in names)])
        other = torch.autograd.grad(objective(results[1]), [hidden, *(pairs[0][1][name] for name in names.values())])
        torch.testing.assert_close(mine, other)
    torch.testing.assert_close(ours.log_prob(hidden), theirs.log_prob(hidden))
    torch.testing.assert_close(ours.loss(hidden, targets), results[1].loss)
    assert torch.equal(ours.predict(hidden), theirs.predict(hidden))


def test_shapes():
    layer = AdaptiveSoftmax(16, 40, [10, 25])
    for shape in [(), (5,), (2, 3), (2, 3, 4), (0,)]:
        hidden, targets = torch.randn(*shape, 16), torch.randint(40, shape)
        output, loss = layer(hidden, targets)
        assert output.shape == layer.predict(hidden).shape == targets.shape and loss.shape == ()
        assert layer(hidden, targets, reduction="none").loss.shape == targets.shape
        torch.testing.assert_close(layer.log_prob(hidden).exp().sum(-1), torch.ones(shape))
        torch.testing.assert_close(layer.log_prob(hidden).gather(-1, targets[..., None]).squeeze(-1), output)
    with pytest.raises(ValueError, match="targets must have the shape"):
        layer(torch.randn(3, 16), torch.randint(40, (2,)))
    with pytest.raises(ValueError, match="reduction must be mean, sum or none; got 'max'"):
        layer(torch.randn(16), torch.tensor(0), reduction="max")
    with pytest.raises(UserError, match=r"below the vocabulary size \(40\)"):
        layer(torch.randn(16), torch.tensor(40))
    for cutoffs in ([5, 5], [5, 1], [0, 5], [5, 40]):
        with pytest.raises(UserError, match="must increase"):
            AdaptiveSoftmax(16, 40, cutoffs)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_options_match_cross_entropy_of_each_softmax(bias, smoothing, weighted, reduction):
    torch.manual_seed(1)
    layer = AdaptiveSoftmax(16, 40, [10, 25], head_bias=bias).double()
    hidden, targets = torch.randn(3, 8, 16, dtype=torch.float64, requires_grad=True), torch.randint(1, 40, (3, 8))
    targets[0, :2] = 0  # padding
    weights = torch.rand(3, 8, dtype=torch.float64) if weighted else torch.ones(3, 8, dtype=torch.float64)
    expected = []
    for state, word in zip(hidden.flatten(0, 1), targets.flatten().tolist(), strict=True):
        tail = (word >= 10) + (word >= 25)
        root = F.linear(state, *layer.root())
        loss = F.cross_entropy(root, torch.tensor(word if not tail else 9 + tail), label_smoothing=smoothing)
        if tail:
            scores, inside = layer.leaf_scores(state, tail - 1), torch.tensor(word - [10, 25][tail - 1])
            loss = loss + F.cross_entropy(scores, inside, label_smoothing=smoothing)
        expected.append(loss * (word != 0))
    losses = torch.stack(expected).view(3, 8) * weights
    total = {"mean": losses.sum() / weights[targets != 0].sum(), "sum": losses.sum(), "none": losses}[reduction]
    options = {"ignore_index": 0, "reduction": reduction, "label_smoothing": smoothing}
    output, loss = layer(hidden, targets, weights if weighted else None, **options)
    torch.testing.assert_close(loss, total)
    torch.testing.assert_close(output, -layer.nll(hidden, targets.masked_fill(targets == 0, -100)))
    tensors, mix = [hidden, *layer.parameters()], torch.rand_like(loss)
    ours, theirs = (torch.autograd.grad((each * mix).sum(), tensors) for each in (loss, total))
    torch.testing.assert_close(ours, theirs)


def test_plan_avoids_synchronization():
    layer = AdaptiveSoftmax(16, 40, [10, 25])
    targets = torch.randint(-1, 40, (3, 8))
    targets[targets < 0] = -100
    plan, weights = layer.plan(targets), torch.rand(3, 8)
    with emulated_cuda() as gpu:
        layer.to("cuda")
        on_gpu = [each.to("cuda") for each in (torch.randn(3, 8, 16), targets, weights, plan)]
        gpu.forbid_waits = True
        layer(*on_gpu[:3], plan=on_gpu[3], label_smoothing=0.1).loss.backward()
        with pytest.raises(RuntimeError, match="synchronizes with the device"):
            layer(*on_gpu[:3])
        gpu.forbid_waits = False
        layer.to("cpu")
    empty = layer(torch.randn(4, 16), torch.full((4,), -100), torch.rand(4))
    assert empty.loss == 0 and not empty.output.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sums_in_float32(dtype):
    torch.manual_seed(0)
    layer = AdaptiveSoftmax(64, 2000, [100, 500])
    hidden, targets = torch.randn(300, 64, requires_grad=True), torch.randint(2000, (300,))
    loss = layer(hidden, targets).loss
    with torch.autocast("cpu", dtype):
        autocast = layer(hidden, targets).loss
    low = layer.to(dtype)(hidden.to(dtype), targets).loss
    for each in (autocast, low):
        assert each.dtype == torch.float32
        torch.testing.assert_close(each, loss, rtol=1e-3, atol=0)
    low.backward()
    assert {p.grad.dtype for p in layer.parameters()} == {dtype}


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_trains_with_a_plain_optimizer(name):
    torch.manual_seed(0)
    counts = zipf_counts(40)
    layer = getattr(lm, name).from_counts(counts, width=16).double()
    torch.testing.assert_close(layer.log_prob(torch.randn(16).double()).exp().sum().item(), 1.0)
    hidden = torch.randn(12, 16, dtype=torch.float64)
    targets = torch.from_numpy(np.random.default_rng(0).choice(40, 12, p=counts / counts.sum()))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    before = layer.nll(hidden, targets).mean()
    for _ in range(40):
        optimizer.zero_grad()
        layer.loss(hidden, targets).backward()
        optimizer.step()
    assert layer.nll(hidden, targets).mean() < before - 0.5
    reference = torch.stack([log_distribution(layer, state) for state in hidden])
    torch.testing.assert_close(layer.log_prob(hidden), reference)


def test_from_counts_rejects_unsorted_counts():
    for counts in ([1, 2, 3], []):
        with pytest.raises(UserError, match="decreasing order"):
            AdaptiveSoftmax.from_counts(counts, width=16)


def test_import_needs_nothing_of_the_application():
    code = """
import sys, lm
assert {"AdaptiveSoftmax", "load", "__version__"} <= set(dir(lm)) and "torch" not in sys.modules
lm.AdaptiveSoftmax
print(sorted({"hydra", "omegaconf", "numba", "tensorboard", "filelock"} & {name.split(".")[0] for name in sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def page_names() -> dict:
    """Run the page's Python blocks in order; return their names."""
    names: dict = {"__name__": "page"}
    for block in blocks(PAGE):
        if block.kind == "python":
            exec(block.text, names)
    return names


def test_page_can_be_followed(capsys):
    names = page_names()
    assert names["new"].n_classes == 50_000
    assert eval(capsys.readouterr().out)[-1] > 1000
    plan, words = names["plan"], names["words"]
    torch.manual_seed(0)
    model = names["model"].eval()
    torch.testing.assert_close(model(words, plan=plan), model(words))


@pytest.mark.slow
def test_compiled_transformer_has_the_same_gradients():
    names = page_names()
    model, words, plan = (names[name] for name in ("model", "words", "plan"))
    model.eval()
    expected = torch.autograd.grad(model(words), list(model.parameters()))
    for options, arguments in (({}, {}), ({"fullgraph": True}, {"plan": plan})):
        compiled = torch.compile(model, backend="aot_eager", **options)
        found = torch.autograd.grad(compiled(words, **arguments), list(model.parameters()))
        torch.testing.assert_close(found, expected)


def train_rank(folder: str) -> None:
    """Average the gradients of two ranks, each on its own words."""
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    names = page_names()
    model, words, rank = names["model"].eval(), names["words"], torch.distributed.get_rank()
    torch.distributed.broadcast(words, 0)
    for parameter in model.parameters():
        torch.distributed.broadcast(parameter.data, 0)
    model.zero_grad()
    parallel = nn.parallel.DistributedDataParallel(model)
    # Rank 1 reads only frequent words, so that its tails get no tokens.
    parallel(words if rank == 0 else words % 50).backward()
    averaged = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    ((model(words) + model(words % 50)) / 2).backward()
    torch.testing.assert_close(averaged, [p.grad for p in model.parameters()])
    (Path(folder) / f"rank-{rank}").touch()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_average_gradients(tmp_path):
    ended = run_ranks(train_rank, str(tmp_path), ranks=2, folder=tmp_path)
    assert ended.codes == [0, 0], ended.err
    assert {path.name for path in tmp_path.glob("rank-?")} == {"rank-0", "rank-1"}


# ---- bias and shortlist ----------------------------------------------------------------------------------------------


def torch_module(*, head_bias=False, div_value=4.0, width=64) -> nn.AdaptiveLogSoftmaxWithLoss:
    torch.manual_seed(0)
    return nn.AdaptiveLogSoftmaxWithLoss(width, 60, [10, 30], div_value=div_value, head_bias=head_bias)


@pytest.mark.parametrize("head_bias", [False, True])
@pytest.mark.parametrize(("width", "div_value"), [(128, 4), (128, 2.0), (66, 4), (64, 1)])
def test_torch_round_trip_is_exact(head_bias, width, div_value):
    module = torch_module(head_bias=head_bias, width=width, div_value=div_value)
    back = AdaptiveSoftmax.from_torch(module).to_torch()
    assert back.state_dict().keys() == module.state_dict().keys()
    assert all(torch.equal(back.state_dict()[key], value) for key, value in module.state_dict().items())


def test_conversion_raises_for_layers_torch_cannot_express():
    with pytest.raises(UserError, match=r"a shortlist and widths \[16, 16\]"):
        make_layer("adaptive", width=48).to_torch()
    with pytest.raises(UserError, match="no shortlist"):
        make_layer("adaptive_leaf", width=128).to_torch()


def test_head_bias_starts_at_log_frequencies():
    counts = np.array([40, 30, 10, 8, 7, 5])
    config = AdaptiveConfig("adaptive", cutoffs=[2, 4], head_bias=True)
    bias = build_output(config, width=16, counts=counts).head_bias
    assert bias is not None
    np.testing.assert_allclose(bias.detach().exp().numpy(), [0.4, 0.3, 0.18, 0.12], rtol=1e-6)
    whole = build_output(AdaptiveConfig("adaptive", cutoffs=[], head_bias=True), width=16, counts=counts).head_bias
    np.testing.assert_allclose(whole.detach().exp().numpy(), counts / 100, rtol=1e-6)
