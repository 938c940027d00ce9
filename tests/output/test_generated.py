"""Generated code for the passes over the logits: no graph break, no compilation per batch, the same losses.

The compiler's back end is not under test, and would need a C++ compiler: tests use those that generate no code.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from lm.config.schema import TrainConfig
from lm.data.opening import open_corpus
from lm.output.generated import compile_loss, compiled_softmax, joined_softmax
from lm.system.errors import UserError
from tests.helpers.layers import NAMES, gradients, make_layer
from tests.helpers.training import losses_of, make_trainer, no_waiting_for_the_gpu

if TYPE_CHECKING:
    from torch._dynamo.testing import CompileCounter

Tiny = Callable[..., TrainConfig]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    """Whatever was compiled before is forgotten."""
    torch._dynamo.reset()
    compiled_softmax.cache_clear()
    yield
    torch._dynamo.reset()
    compiled_softmax.cache_clear()


@pytest.fixture
def counter() -> "CompileCounter":
    """Compiles nothing, and counts what it was given."""
    from torch._dynamo.testing import CompileCounter  # takes as long as importing torch

    return CompileCounter()


@pytest.fixture
def backend(counter: "CompileCounter", monkeypatch: pytest.MonkeyPatch) -> "CompileCounter":
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    return counter


def test_the_passes_are_one_graph_for_all_sizes(counter: "CompileCounter") -> None:
    compiled = torch.compile(joined_softmax, backend=counter, fullgraph=True, dynamic=True)
    for rows, words in [(3, 40), (5, 70), (7, 33), (64, 500), (2, 9), (100, 20)]:
        logits, target = torch.randn(rows, words), torch.randint(words, (rows, 1))
        loss = compiled(found := logits.clone(), target)
        torch.testing.assert_close(found, logits.softmax(1))
        torch.testing.assert_close(loss, -logits.log_softmax(1).gather(1, target))
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradients_are_those_without_compilation(name: str, backend: "CompileCounter") -> None:
    layer = make_layer(name, dtype=torch.float32)
    hidden, targets = torch.randn(6, 5, 16), torch.randint(40, (6, 5))
    plan = layer.plan(targets, generator=torch.Generator().manual_seed(1))
    found = []
    for compiled in (False, True):
        if compiled:
            compile_loss(layer, device=CPU, notice=lambda _: None)
        layer.zero_grad()
        loss = layer.loss(hidden.clone().requires_grad_(), targets, plan)
        loss.backward()
        found.append({"loss": loss.detach(), **{k: g.clone() for k, g in gradients(layer).items()}})
    assert backend.frame_count > 0
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-7)


def test_batches_of_other_sizes_compile_nothing_more(tiny: Tiny, backend: "CompileCounter") -> None:
    """A tail has another number of tokens in every batch; only the first steps may compile."""
    config = tiny("output=adaptive", "output.cutoffs=[10,20]", "trainer.batch_size=16", "trainer.micro_batches=2")
    trainer, batches = make_trainer(config, open_corpus(config.data, notice=lambda _: None), num_batches=25)
    compile_loss(trainer.model.output, device=CPU, notice=lambda _: None)
    assert len({plan.counts for batch in batches for plan in batch.plans}) > 20, "sizes do differ"
    compiled = losses_of(trainer, batches[:5])
    after_a_few = backend.frame_count
    compiled += losses_of(trainer, batches[5:])
    assert backend.frame_count == after_a_few <= 4
    plain, _ = make_trainer(config, open_corpus(config.data, notice=lambda _: None), num_batches=1)
    assert compiled == pytest.approx(losses_of(plain, batches), rel=1e-5)


def test_a_machine_that_cannot_compile_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> object:
        raise RuntimeError("No working C++ compiler found in g++\nand a long story")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=fail))
    with pytest.raises(UserError, match=r"trainer\.compile=true does not work .*Try trainer\.compile=false"):
        compile_loss(make_layer("full"), device=CPU, notice=lambda _: None)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_generated_code_on_a_gpu_trains_alike_and_waits_for_nothing(tiny: Tiny, precision: str) -> None:
    config = tiny("output=adaptive", "output.cutoffs=[10,20]", f"trainer.precision={precision}")
    corpus = open_corpus(config.data, notice=lambda _: None)
    plain, batches = make_trainer(config, corpus, device="cuda", num_batches=12)
    compiled, _ = make_trainer(config, corpus, device="cuda", num_batches=1)
    compile_loss(compiled.model.output, device=torch.device("cuda"), notice=lambda _: None)
    expected, found = losses_of(plain, batches), losses_of(compiled, batches[:6])
    before = compiled.loss_sum.item()
    with no_waiting_for_the_gpu():
        for batch in batches[6:]:
            compiled.train_step(batch)
    assert found == pytest.approx(expected[:6], rel=0.01)
    rest = (compiled.loss_sum.item() - before) / sum(batch.num_tokens for batch in batches[6:])
    assert rest == pytest.approx(sum(expected[6:]) / 6, rel=0.02)
