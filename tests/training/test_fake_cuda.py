"""A training step on CUDA tensors without values: no operation across devices, and none that waits for the GPU."""

from itertools import cycle, product

import pytest

from lm.config.registry import plugin_names
from tests.helpers.fake_cuda import compile_library, run_steps
from tests.helpers.training import LAYERS
from tests.helpers.ways import CORES, INPUTS, TIED

FORMS = ["trainer.precision=fp32", "trainer.precision=bf16 trainer.micro_batches=3 model.dropout=0.2"]
OPTIMIZERS = [
    "optim.weight_decay=1e-4 trainer.average=0.99",
    "optim.embedding=rowwise optim.weight_decay=1e-4",
    "optim.embedding=dense",
    *(f"optim={name} optim.weight_decay=1e-4" for name in plugin_names("optim") if name != "adagrad"),
]
FEW = [
    f"{layer} model.hidden_size=64 {form} {optimizer}"
    for layer, form, optimizer in zip(LAYERS, cycle(FORMS), cycle(OPTIMIZERS), strict=False)
]
"""Every layer, form and optimizer, but not with each other."""
ALL = [
    *(f"{layer} model.hidden_size=64 {' '.join(rest)}" for layer, *rest in product(LAYERS, FORMS, OPTIMIZERS)),
    *(f"{layer} {core} model.hidden_size=64 {form}" for layer, core, form in product(LAYERS, CORES, FORMS)),
    *(" ".join(parts) for parts in product([*INPUTS, *TIED], FORMS, OPTIMIZERS)),
]


@pytest.mark.parametrize(
    "variations",
    [pytest.param(FEW, id="few"), pytest.param(ALL, id="all", marks=pytest.mark.slow)],
)
def test_a_step_runs_on_fake_cuda_and_never_waits(tmp_path, variations):
    try:
        library = compile_library(tmp_path)
    except RuntimeError as error:
        pytest.skip(str(error))
    found = run_steps(library, variations, timeout=1200)
    assert set(found) == set(variations)
    assert not {variation: problem for variation, problem in found.items() if problem}
