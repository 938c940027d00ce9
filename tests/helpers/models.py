"""Small models with each output layer, small n-gram models, and reference probabilities."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.config.schema import TrainConfig
from lm.data.corpora.zipf import ZipfConfig
from lm.data.corpus import SplitText
from lm.data.text.vocabulary import Vocabulary
from lm.inference.open_model import LoadedModel
from lm.model.language_model import LanguageModel, build_model
from lm.model.predictor import Predictor
from lm.model.scoring import Score, score
from lm.ngram.kneser_ney import estimate
from lm.ngram.model import NgramPredictor
from lm.ngram.trie import count_ngrams

VOCABULARY = Vocabulary.from_counts([(f"w{i}", 50 - i) for i in range(9)])
CUTOFFS = ["output.cutoffs=[3,7]", "model.hidden_size=32"]
LAYERS = {
    "full": [],
    "sampled": [],
    "hsm_freq": [],
    "hsm_sim": [],
    "dsoftmax": CUTOFFS,
    "dsoftmax_star": CUTOFFS,
    "adaptive": CUTOFFS,
}


def small_model(tiny: Callable[..., TrainConfig], layer: str = "adaptive") -> LanguageModel:
    """Build an untrained model with weights large enough for peaked distributions."""
    model = build_model(tiny(f"output={layer}", "model.layers=2", *LAYERS.get(layer, [])), VOCABULARY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model.eval()


def loaded_model(model: Predictor, *, batch_size: int = 64) -> LoadedModel:
    """Wrap a model of VOCABULARY as if it came from a checkpoint."""
    return LoadedModel(model, VOCABULARY, ZipfConfig("zipf"), 1, "a model", Path("none"), {}, batch_size=batch_size)


@torch.no_grad()
def log_distributions(model: LanguageModel, words: Sequence[int], *, eos_id: int = VOCABULARY.eos_id) -> list[Tensor]:
    """Compute the log-distribution before each word and after the last, one word at a time from `</s>`."""
    state, found = model.initial_state(1), []
    for word in [eos_id, *words]:
        hidden, state = model(torch.tensor([[word]]), state)
        found.append(model.output.log_prob(hidden)[0, 0])
    return found


def small_ngrams() -> NgramPredictor:
    """Count the trigrams of a random text."""
    text = np.random.default_rng(1).integers(0, len(VOCABULARY), 400)
    counts = count_ngrams(text, order=3, vocab_size=len(VOCABULARY), eos_id=VOCABULARY.eos_id)
    return NgramPredictor(estimate(counts, modified=True, min_counts=[1] * 3, eos_id=VOCABULARY.eos_id)[0])


def reading(streams: int = 1, batch_size: int = 1) -> dict[str, Any]:
    """Return options of `token_nll`."""
    return {"streams": streams, "batch_size": batch_size, "eos_id": VOCABULARY.eos_id, "label": "test"}


def score_tokens(model: Predictor, tokens: NDArray[Any], *, vocabulary: Vocabulary = VOCABULARY, **sizes: int) -> Score:
    """Score token ids as a split; by default, as one stream."""
    text, sizes = SplitText(tokens, len(tokens), len(tokens)), {"streams": 1, "batch_size": 1, **sizes}
    return score(model, text, vocabulary, label="test", **sizes)
