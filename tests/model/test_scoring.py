"""Scoring: every token counts once, results do not depend on the batch size and match a reference."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.config.schema import TrainConfig
from lm.data.text.vocabulary import Vocabulary
from lm.model.language_model import LanguageModel, build_model
from lm.model.scoring import WARM_UP, lay_out, perplexity, spans_of
from lm.output.base import IGNORE_INDEX
from tests.helpers.models import score_tokens

WORDS = 11
VOCABULARY = Vocabulary.from_counts([(f"w{i}", 50 - i) for i in range(WORDS - 2)])


@pytest.fixture
def model(tiny) -> LanguageModel:
    config: TrainConfig = tiny("model.layers=2", "model.dropout=0.5")
    return build_model(config, VOCABULARY)


def random_tokens(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, WORDS, count).astype(np.uint16)


def evaluate(model: LanguageModel, tokens: np.ndarray, **sizes: int):
    return score_tokens(model, tokens, vocabulary=VOCABULARY, **sizes)


@given(num_tokens=st.integers(1, 3000), streams=st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_every_token_is_scored_once(num_tokens: int, streams: int) -> None:
    tokens = np.arange(num_tokens)  # each token equals its position
    seen = []
    for piece in spans_of(tokens, streams, eos_id=-7, warm_up=WARM_UP):
        inputs_TB, targets_TB = lay_out(tokens, [piece], eos_id=-7)
        scored = targets_TB[:, 0] != IGNORE_INDEX
        seen += targets_TB[scored, 0].tolist()
        before = inputs_TB[scored, 0]
        expected = targets_TB[scored, 0] - 1
        expected[expected == -1] = -7
        assert torch.equal(before, expected)
        start = int(targets_TB[scored, 0][0])
        assert int((~scored).sum()) == min(WARM_UP, start)
    assert seen == list(range(num_tokens))


def test_scores_are_independent_of_batch_size(model: LanguageModel) -> None:
    tokens = random_tokens(1500)
    results = [evaluate(model, tokens, streams=7, batch_size=size) for size in (1, 2, 3, 7, 50)]
    for result in results:
        assert result.tokens == 1500
        assert result.perplexity == pytest.approx(results[0].perplexity, rel=1e-6)
        assert result.perplexity_without_unk == pytest.approx(results[0].perplexity_without_unk, rel=1e-6)


@torch.no_grad()
def test_single_stream_matches_chain_rule(model: LanguageModel) -> None:
    """Reference: word by word from `</s>` and a zero state, using the full distribution."""
    tokens = random_tokens(60)
    state = model.eval().initial_state(1)
    total = unk = 0.0
    previous = VOCABULARY.eos_id
    for word in tokens.tolist():
        hidden, state = model(torch.tensor([[previous]]), state)
        log_probability = float(model.output.log_prob(hidden)[0, 0, word])
        total -= log_probability
        unk -= log_probability if word == VOCABULARY.unk_id else 0
        previous = word
    result = evaluate(model, tokens, streams=1, batch_size=1)
    unk_tokens = int((tokens == VOCABULARY.unk_id).sum())
    assert result.perplexity == pytest.approx(math.exp(total / 60), rel=1e-5)
    assert result.perplexity_without_unk == pytest.approx(math.exp((total - unk) / (60 - unk_tokens)), rel=1e-5)
    assert result.oov_rate == unk_tokens / 60 > 0


@pytest.mark.parametrize("output", ["adaptive", "dsoftmax", "dsoftmax_star"])
@torch.no_grad()
def test_reports_loss_and_share_by_cluster(tiny, output: str) -> None:
    config = tiny(f"output={output}", "output.cutoffs=[3,7]", "model.hidden_size=32")
    model, tokens = build_model(config, VOCABULARY), random_tokens(200)
    tokens = tokens[tokens < 9]
    result = evaluate(model, tokens, streams=1, batch_size=1)
    inputs_TB, targets_TB = lay_out(tokens, [(0, 0, len(tokens))], eos_id=VOCABULARY.eos_id)
    hidden_TBD, _ = model.eval()(inputs_TB, model.initial_state(1))
    nll_T = model.output.nll(hidden_TBD, targets_TB).flatten()
    for number, (first, end) in enumerate([(0, 3), (3, 7), (7, 11)]):
        inside_T = (targets_TB.flatten() >= first) & (targets_TB.flatten() < end)
        assert result.by_cluster()[f"output/cluster_{number}/loss"] == pytest.approx(nll_T[inside_T].mean().item())
        assert result.by_cluster()[f"output/cluster_{number}/share"] == pytest.approx(inside_T.double().mean().item())


def test_scoring_disables_dropout_and_restores_training_mode(model: LanguageModel) -> None:
    model.train()
    first = evaluate(model, random_tokens(300), streams=2, batch_size=2)
    assert model.training
    model.eval()
    assert evaluate(model, random_tokens(300), streams=2, batch_size=2).nll == first.nll


def test_perplexity_handles_overflow_and_no_tokens() -> None:
    assert perplexity(0.0, 5) == 1.0
    assert perplexity(1e6, 5) == math.inf
    assert math.isnan(perplexity(0.0, 0))
