"""Unnormalized scores as log-probabilities, and the reported error."""

import json
import re

import numpy as np
import pytest
import torch

from lm.inference.open_model import open_model
from lm.inference.unnormalized import EVERY, Unnormalized
from lm.system.errors import UserError
from tests.conftest import TINY, Command


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    from tests.conftest import run_command

    folder = tmp_path_factory.mktemp("unnormalized")
    run_command(folder, "train.py", *TINY, "output=self_normalized", "run_dir=run")
    return folder / "run"


def test_likelihoods_are_raw_scores(run):
    opened = open_model(str(run), device="cpu")
    model = opened.model
    words = torch.randint(model.vocab_size, (150, 2))
    targets = torch.randint(model.vocab_size, (150, 2))
    targets[3, 1] = -100
    text = np.random.default_rng(1).integers(model.vocab_size, size=90)
    wrapped = Unnormalized(model, text, eos_id=1, name="run")
    with torch.no_grad():
        hidden, _ = model(words, model.initial_state(2))
        predictions, _ = wrapped.read(words, wrapped.initial_state(2))
        counts = torch.as_tensor(opened.vocabulary.counts, dtype=torch.float64).clamp(min=1)
        scores = hidden @ model.output.weight.t() + torch.log(counts / counts.sum())
        before = torch.tensor([1, *text[:-1]])[:, None]
        fitted = model(before, model.initial_state(1))[0] @ model.output.weight.t() + torch.log(counts / counts.sum())
        assert np.isclose(wrapped.estimate, float(fitted.logsumexp(-1).mean()), atol=1e-5)
        expected = wrapped.estimate - scores.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
        expected = expected.masked_fill(targets == -100, 0)
        torch.testing.assert_close(predictions.nll(targets), expected.float(), rtol=1e-5, atol=1e-5)
        scored = (targets != -100).flatten()[::EVERY]
        off = scores.logsumexp(-1).flatten()[::EVERY][scored] - wrapped.estimate
        torch.testing.assert_close(torch.cat([error for error, _ in wrapped.exact]), off.float(), rtol=1e-4, atol=1e-4)
        assert torch.equal(predictions.topk(3)[1], model.output.topk(hidden, 3)[1])


def test_command_reports_approximation_error(run, command: Command):
    exact = json.loads(_evaluate(command, run).read_text())
    out = command("evaluate.py", f"checkpoint={run}", "evaluate.normalize=false").stdout
    said = re.search(r"The mean error is (\S+),.*perplexity is (\S+) instead of (\S+) \(", out, re.DOTALL)
    assert said is not None, out
    assert abs(float(said[1])) < 1
    shortcut = json.loads((run / "evaluation-step-40-unnormalized.json").read_text())
    ratio = shortcut["splits"]["test"]["perplexity"] / exact["splits"]["test"]["perplexity"]
    assert np.isclose(ratio, 1, atol=0.5) and ratio != 1
    lines = command(
        "evaluate.py", f"checkpoint={run}", "evaluate.normalize=false", "mode=score", "input=-", stdin=b"w1 w2\n"
    )
    assert "Not normalized" in lines.stderr


def _evaluate(command, run):
    command("evaluate.py", f"checkpoint={run}")
    return run / "evaluation-step-40.json"


def test_other_layers_raise(tiny_run):
    with pytest.raises(UserError, match="needs a layer whose scores are trained to be log-probabilities"):
        Unnormalized(open_model(str(tiny_run), device="cpu").model, np.zeros(3, int), eos_id=1, name="run")
