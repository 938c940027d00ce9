"""Dynamic evaluation versus its definition; every token is scored before it changes any weight."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lm.config.groups import plugin_names
from lm.config.inference import DynamicKind, EvaluateConfig, ScoringOverrides
from lm.inference.dynamic import EPSILON, Dynamic, DynamicSettings, gradient_rms, make_dynamic
from lm.inference.evaluate import evaluate
from lm.inference.mixture import Mixture
from lm.inference.open_model import open_model
from lm.model.language_model import build_model
from lm.model.scoring import token_nll
from lm.output.layers.full import FullSoftmax
from lm.system.errors import UserError
from tests.conftest import Tiny
from tests.helpers.models import VOCABULARY, reading, small_model, small_ngrams
from tests.helpers.ways import CORES, INPUTS, MAXENT, TIED, TRANSFORMER

SGD, RMS = "sgd", "rms"
TEXT = np.random.default_rng(0).integers(0, len(VOCABULARY), 60)
ALL = [*CORES, *INPUTS, *TIED, *MAXENT, *(f"output={name}" for name in plugin_names("output"))]
FEW = [TRANSFORMER, INPUTS[1], TIED[1], MAXENT[0], "output=sampled", "output=hsm_huffman"]
CLASSES = np.arange(len(VOCABULARY)) % 3


def settings(kind: DynamicKind = SGD, lr: float = 0.5, decay: float = 0.0, segment: int = 7) -> DynamicSettings:
    return DynamicSettings(kind, lr, decay, segment)


@pytest.mark.parametrize("way", [*FEW, *(pytest.param(way, marks=pytest.mark.slow) for way in ALL if way not in FEW)])
def test_zero_rate_equals_plain_evaluation_to_the_bit(tiny: Tiny, way: str) -> None:
    """A rate above zero changes predictions after the first segment."""
    way = way.replace("[10,20]", "[3,7]")
    clustered = any(name in way for name in ("adaptive", "dsoftmax")) and "cutoffs" not in way
    config = tiny(*way.split(), *(["output.cutoffs=[3]"] if clustered else []))
    model = build_model(config, VOCABULARY, classes=CLASSES if "hsm_sim" in way else None).eval()
    model.segment = 7
    plain = token_nll(model, TEXT, **reading())
    assert np.array_equal(token_nll(Dynamic(model, settings(lr=0)), TEXT, **reading()), plain)
    learned = token_nll(Dynamic(model, settings(lr=0.5)), TEXT, **reading())
    assert np.array_equal(learned[:7], plain[:7]) and (learned[7:] != plain[7:]).any()
    assert np.isfinite(learned).all()


@pytest.mark.parametrize(("kind", "decay"), [(SGD, 0.0), (RMS, 0.0), (RMS, 0.4)])
def test_updates_match_definition(tiny: Tiny, kind: DynamicKind, decay: float) -> None:
    """The reference uses autograd on a plain softmax and formulas over all weights as one vector."""
    model = small_model(tiny, "full")
    reference, chosen = deepcopy(model), settings(kind, 0.05, decay)
    generator = torch.Generator().manual_seed(1)
    rms = [torch.rand(p.shape, generator=generator) for p in model.parameters()]
    found = token_nll(Dynamic(model, chosen, rms), TEXT, **reading())

    assert isinstance(reference.output, FullSoftmax)
    weights = [p.requires_grad_() for p in reference.parameters()]
    flat_rms = torch.nn.utils.parameters_to_vector(rms)
    trained = torch.nn.utils.parameters_to_vector(weights).detach()
    inputs = torch.tensor([VOCABULARY.eos_id, *TEXT[:-1]])[:, None]
    state, expected = reference.initial_state(1), []
    for words_T1, targets_T in zip(inputs.split(7), torch.from_numpy(TEXT).split(7), strict=True):
        hidden_T1D, state = reference(words_T1, state)
        nll_T = F.cross_entropy(hidden_T1D[:, 0] @ reference.output.weight.T, targets_T, reduction="none")
        expected.append(nll_T.detach())
        grad = torch.nn.utils.parameters_to_vector(torch.autograd.grad(nll_T.mean(), weights))
        now = torch.nn.utils.parameters_to_vector(weights).detach()
        state = [tuple(t.detach() for t in layer) for layer in state]
        if kind is SGD:
            now = now - 0.05 * grad
        else:
            pull = (decay * flat_rms / flat_rms.mean()).clamp(max=1)
            now = now - 0.05 * grad / (flat_rms + EPSILON * flat_rms.mean()) + pull * (trained - now)
        torch.nn.utils.vector_to_parameters(now, weights)
    np.testing.assert_allclose(found, torch.cat(expected).numpy(), rtol=1e-4, atol=1e-5)


def test_every_token_is_scored_before_it_is_learned_from(tiny: Tiny) -> None:
    dynamic = Dynamic(small_model(tiny), settings())
    before = token_nll(dynamic, TEXT, **reading())
    for changed in (20, 21, 22):  # the last token of a segment and the first two of the next
        text = TEXT.copy()
        text[changed:] = (text[changed:] + 1) % len(VOCABULARY)
        after = token_nll(dynamic, text, **reading())
        # A matmul over another number of a cluster's tokens may round differently.
        np.testing.assert_allclose(after[:changed], before[:changed], rtol=1e-6)


def test_each_text_starts_from_trained_weights(tiny: Tiny) -> None:
    model = small_model(tiny)
    trained = [p.detach().clone() for p in model.parameters()]
    dynamic = Dynamic(model, settings())
    first, second = (token_nll(dynamic, TEXT, **reading()) for _ in range(2))
    assert np.array_equal(first, second)
    dynamic.initial_state(1)
    assert all(torch.equal(p, t) for p, t in zip(model.parameters(), trained, strict=True))


def test_gradient_rms_matches_definition(tiny: Tiny) -> None:
    """On a text of two segments there is one gradient: that of the second segment."""
    model = small_model(tiny, "full")
    dynamic = Dynamic(model, settings(segment=5))
    found = gradient_rms(dynamic, TEXT[:10], eos_id=VOCABULARY.eos_id)
    words_T1 = torch.tensor([VOCABULARY.eos_id, *TEXT[:9]])[:, None]
    with torch.no_grad():
        _, state = model(words_T1[:5], model.initial_state(1))
    hidden_T1D, _ = model(words_T1[5:], state)
    assert isinstance(model.output, FullSoftmax)
    loss = F.cross_entropy(hidden_T1D[:, 0] @ model.output.weight.T, torch.from_numpy(TEXT[5:10]))
    for rms, grad in zip(found, torch.autograd.grad(loss, list(model.parameters())), strict=True):
        torch.testing.assert_close(rms, grad.abs(), rtol=1e-4, atol=1e-6)


def test_repetitive_text_becomes_likelier_and_mixtures_adapt(tiny: Tiny) -> None:
    """A mixture reads in its dynamic member's segments, so its likelihoods follow from those of its members."""
    model, text = small_model(tiny), np.tile(TEXT[:5], 30)
    plain = token_nll(model, text, **reading())
    dynamic, ngrams = Dynamic(model, settings(lr=0.2)), small_ngrams()
    learned = token_nll(dynamic, text, **reading())
    assert learned[-50:].mean() < plain[-50:].mean() - 0.5
    counted = token_nll(ngrams, text, **reading())
    mixed = token_nll(Mixture([dynamic, ngrams], [0.6, 0.4]), text, **reading())
    np.testing.assert_allclose(mixed, -np.log(0.6 * np.exp(-learned) + 0.4 * np.exp(-counted)), rtol=1e-6)


@pytest.mark.parametrize("kind", get_args(DynamicKind))
def test_evaluation_tunes_labels_and_writes_settings(
    tiny_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: DynamicKind,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tiny_run.parent)
    monkeypatch.setattr("lm.inference.dynamic.RMS_SEGMENTS", 20)
    chosen = ScoringOverrides(dynamic=kind, dynamic_segment=50)
    path = tmp_path / "found.json"
    evaluate(EvaluateConfig(checkpoint=str(tiny_run), evaluate=chosen, splits=["valid"], json=str(path)))
    printed, report = capsys.readouterr().out, json.loads(path.read_text())
    assert "valid, dynamic" in printed and f": {kind}, lr " in printed and "best" in printed
    (found,) = report["dynamic"]
    assert found["kind"] == kind and found["segment"] == 50 and report["splits"]["valid"]["streams"] == 1


def test_tuning_on_another_text_raises(tiny_run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = open_model(str(tiny_run), device="cpu")
    other = replace(loaded, data=replace(loaded.data, tokens=1500))  # type: ignore[call-arg]
    with pytest.raises(UserError, match="cannot read the run's validation text"):
        make_dynamic([other], ScoringOverrides(dynamic="sgd"))
    (dynamic,) = make_dynamic([other], ScoringOverrides(dynamic="sgd", dynamic_lr=0.1))
    assert dynamic.model.segment == 20
