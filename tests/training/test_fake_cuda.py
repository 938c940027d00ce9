"""A training step on fake CUDA tensors: no operation mixes devices or synchronizes."""

from itertools import product

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
VARIATIONS = [
    *(f"{layer} model.hidden_size=64 {' '.join(rest)}" for layer, *rest in product(LAYERS, FORMS, OPTIMIZERS)),
    *(f"{layer} {core} model.hidden_size=64 {form}" for layer, core, form in product(LAYERS, CORES, FORMS)),
    *(" ".join(parts) for parts in product([*INPUTS, *TIED], FORMS, OPTIMIZERS)),
]


@pytest.mark.slow
def test_step_runs_on_fake_cuda_without_synchronizing(tmp_path):
    try:
        library = compile_library(tmp_path)
    except RuntimeError as error:
        pytest.skip(str(error))
    found = run_steps(library, VARIATIONS, timeout=1200)
    assert set(found) == set(VARIATIONS)
    assert not {variation: problem for variation, problem in found.items() if problem}
