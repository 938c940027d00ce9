"""Cost model: recovers known times, can be saved and loaded, rejects invalid files."""

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.output.clusters import cost_model
from lm.output.clusters.cost_model import (
    BlockCost,
    Floats,
    Points,
    fit,
    flops_model,
    load_model,
    measured_model,
    save_model,
)
from lm.system.devices import Precision
from lm.system.errors import UserError

WORDS, TOKENS = (np.array(axis, dtype=float) for axis in np.meshgrid([64, 1024, 8192, 32768], [25, 128, 850]))
WORDS, TOKENS = WORDS.ravel(), TOKENS.ravel()

coefficients = st.tuples(
    st.sampled_from([0.0, 2e-4]),
    st.floats(1e-5, 1e-3, allow_subnormal=False),
    st.floats(1e-9, 1e-7, allow_subnormal=False),
    st.sampled_from([0.0, 1e-7]),
    st.sampled_from([0.0, 1e-6]),
)


def points(seconds: Floats) -> Points:
    return dict(zip(zip(WORDS.tolist(), TOKENS.tolist(), strict=True), seconds.tolist(), strict=True))


@given(coefficients)
@settings(max_examples=100, deadline=None)
def test_fit_recovers_noiseless_times(values) -> None:
    true = BlockCost(*values)
    found = fit(points(true.seconds(WORDS, TOKENS)))
    assert found.error < 0.02
    beyond = found.seconds(200_000.0, 300.0) / true.seconds(200_000.0, 300.0)
    assert beyond == pytest.approx(1, abs=0.1)


def test_fit_reports_error() -> None:
    true = BlockCost(0, 1e-4, 1e-8, 1e-7, 1e-6)
    noise = np.random.default_rng(0).normal(1, 0.05, len(WORDS))
    found = fit(points(true.seconds(WORDS, TOKENS) * noise))
    assert 0.01 < found.error < 0.08
    assert found.per_pair == pytest.approx(true.per_pair, rel=0.1)
    assert min(found.floor, found.constant, found.per_pair, found.per_word, found.per_token) >= 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_poorly_fitting_model_is_not_saved(
    tmp_path: Path, precision: Precision, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cost_model, "SECONDS", 0.5)
    measured = partial(measured_model, [32, 8], 64, torch.device("cpu"), precision, cache_dir=tmp_path)
    model = measured()
    assert len(model.blocks) == 2
    assert model.blocks[0].seconds(4096, 64) > model.blocks[0].seconds(32, 64) > 0
    saved = list(tmp_path.glob("*.json"))
    assert len(saved) == (model.error <= cost_model.MAX_ERROR)
    if saved:
        again = measured()
        assert again.blocks == model.blocks
        assert again.source == f"{model.source}, earlier", "a line has no room for the file's name"
    assert capsys.readouterr().out.count("\n") == 1 + (not saved)


def test_cost_model_save_and_load(tmp_path: Path) -> None:
    model = flops_model([64, 16, 8])
    save_model(model, tmp_path / "model.json")
    assert load_model(tmp_path / "model.json").blocks == model.blocks
    for content in ["", "[]", "{}", json.dumps({"format": 1, "source": "x", "blocks": [{"floor": -1}]})]:
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(UserError, match=r"output.cost_model must be"):
            load_model(tmp_path / "bad.json")
    with pytest.raises(UserError, match=r"output.cost_model must be"):
        load_model(tmp_path / "missing.json")


def test_damaged_cache_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_model, "SECONDS", 0.01)
    monkeypatch.setattr(cost_model, "MAX_ERROR", math.inf)
    measured = partial(measured_model, [8], 16, torch.device("cpu"), "fp32", cache_dir=tmp_path)
    measured()
    (saved,) = tmp_path.glob("*.json")
    saved.write_text(saved.read_text()[:20])
    blocks = measured().blocks
    assert load_model(saved).blocks == blocks
