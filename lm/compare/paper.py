"""The paper's results (section 5): perplexity and minutes after 5 epochs on one Maxwell GPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NOTE = "The paper's columns are its published results: 5 epochs on one Maxwell GPU of 2016."
LAYERS = ("full", "sampled", "hsm_freq", "hsm_sim", "dsoftmax", "dsoftmax_star", "adaptive")


@dataclass(frozen=True)
class PaperResult:
    """One cell of the paper's tables."""

    vocabulary: int
    perplexity: float
    minutes: float | None = None
    speed_up: float | None = None
    """Speed-up over the full softmax, in training minutes."""


def _column(vocabulary: int, *cells: tuple[float, float]) -> dict[str, PaperResult]:
    """Perplexity and minutes by layer, in the order of LAYERS."""
    full_minutes = cells[0][1]
    return {
        layer: PaperResult(vocabulary, perplexity, minutes, full_minutes / minutes)
        for layer, (perplexity, minutes) in zip(LAYERS, cells, strict=True)
    }


TEXT8 = _column(44_000, (144, 83), (166, 41), (166, 34), (155, 41), (195, 53), (147, 54), (147, 30))
EUROPARL = {
    "bg": _column(50_000, (37, 58), (40, 29), (43, 17), (39, 25), (47, 36), (37, 36), (37, 18)),
    "cs": _column(83_000, (62, 132), (70, 53), (78, 29), (68, 43), (82, 75), (62, 76), (62, 30)),
    "da": _column(128_000, (37, 713), (40, 247), (42, 114), (38, 150), (46, 369), (36, 366), (35, 105)),
    "de": _column(143_000, (42, 802), (45, 262), (51, 124), (43, 154), (56, 397), (41, 398), (40, 110)),
    "el": _column(100_000, (38, 383), (41, 144), (45, 73), (39, 98), (50, 211), (37, 213), (36, 72)),
    "es": _column(87_000, (30, 536), (32, 217), (34, 110), (30, 147), (38, 296), (29, 303), (29, 103)),
}
ONE_BILLION_WORD = {1: PaperResult(793_471, 43.9), 2: PaperResult(793_471, 39.8)}
"""By number of LSTM layers. The paper trained the one-layer model in under three days."""

SHARED = {
    "model.name": "lstm",
    "input.name": "table",
    "model.embedding_size": 256,
    "model.projection": None,
    "model.dropout": 0.0,
    "model.tie": False,
    "model.maxent.order": None,
    "trainer.batch_size": 128,
    "trainer.bptt": 20,
    "optim.name": "adagrad",
    "optim.lr": 0.1,
    "optim.schedule": "constant",
    "optim.warmup_steps": 0,
    "optim.reduction": "stream",
    "optim.max_grad_norm": 1.0,
    "optim.accumulator_start": 1e-5,
    "trainer.average": None,
    "init": None,
}
"""Settings shared by all of the paper's experiments."""
ADAPTIVE = {"output.shortlist": True, "output.head_bias": False}
"""Settings specific to the paper's adaptive softmax."""
SAME_VOCABULARY = 0.1
"""Vocabularies of the same text may differ by this fraction (Greek: by 6%)."""


def published(settings: Mapping[str, Any], *, vocab_size: int | None = None) -> PaperResult | None:
    """Look up the paper's result for a run with these settings (by dotted key), if the paper has that experiment.

    Training limits are ignored: a run stopped early still counts as the paper's experiment. A run on a subset of the
    corpus, detected by its vocabulary size, does not.
    """
    result = _cell(settings)
    if result is None or vocab_size is None:
        return result
    return result if abs(vocab_size / result.vocabulary - 1) <= SAME_VOCABULARY else None


def _cell(settings: Mapping[str, Any]) -> PaperResult | None:
    corpus, layer = str(settings.get("data.name")), str(settings.get("output.name"))
    expected = SHARED | {"optim.weight_decay": 0.0 if corpus == "one_billion_word" else 1e-6}
    if any((settings.get(key) or None) != (value or None) for key, value in expected.items()):  # 0 equals null
        return None
    if any(settings.get(key, value) != value for key, value in (ADAPTIVE | {"data.tokenizer": "words"}).items()):
        return None
    if settings.get("optim.embedding") == "rowwise":  # used by the released code, not by the paper
        return None
    width, layers = settings.get("model.hidden_size"), settings.get("model.layers")
    if (width, layers) == (512, 1):
        columns = {"text8": TEXT8, "europarl": EUROPARL.get(str(settings.get("data.language")), {})}
        return columns.get(corpus, {}).get(layer)
    if corpus == "one_billion_word" and layer == "adaptive" and width == 2048 and isinstance(layers, int):
        return ONE_BILLION_WORD.get(layers)
    return None
