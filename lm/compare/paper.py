"""The paper's results (section 5): perplexity and minutes after 5 epochs on one Maxwell GPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NOTE = "The paper's columns are its published results: 5 epochs on one Maxwell GPU of 2016."
LAYERS = ("full", "sampled", "hsm_freq", "hsm_sim", "dsoftmax", "dsoftmax_star", "adaptive")


@dataclass(frozen=True)
class PaperFigures:
    """A cell of the paper's tables."""

    perplexity: float
    minutes: float | None
    speed_up: float | None
    """Over the full softmax, by minutes."""


def _column(*cells: tuple[float, float]) -> dict[str, PaperFigures]:
    """Perplexity and minutes by layer, in the order of LAYERS."""
    full_minutes = cells[0][1]
    return {
        layer: PaperFigures(perplexity, minutes, full_minutes / minutes)
        for layer, (perplexity, minutes) in zip(LAYERS, cells, strict=True)
    }


TEXT8 = _column((144, 83), (166, 41), (166, 34), (155, 41), (195, 53), (147, 54), (147, 30))
EUROPARL = {
    "bg": _column((37, 58), (40, 29), (43, 17), (39, 25), (47, 36), (37, 36), (37, 18)),
    "cs": _column((62, 132), (70, 53), (78, 29), (68, 43), (82, 75), (62, 76), (62, 30)),
    "da": _column((37, 713), (40, 247), (42, 114), (38, 150), (46, 369), (36, 366), (35, 105)),
    "de": _column((42, 802), (45, 262), (51, 124), (43, 154), (56, 397), (41, 398), (40, 110)),
    "el": _column((38, 383), (41, 144), (45, 73), (39, 98), (50, 211), (37, 213), (36, 72)),
    "es": _column((30, 536), (32, 217), (34, 110), (30, 147), (38, 296), (29, 303), (29, 103)),
}
ONE_BILLION_WORD = {1: PaperFigures(43.9, None, None), 2: PaperFigures(39.8, None, None)}
"""By number of LSTM layers; the paper says that the first took less than three days."""

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
    "optim.reduction": "stream",
    "optim.max_grad_norm": 1.0,
}
"""Settings of all the paper's experiments."""
ADAPTIVE = {"output.shortlist": True, "output.head_bias": False}
"""Settings of its adaptive softmax; other layers do not have them."""


def published(settings: Mapping[str, Any]) -> PaperFigures | None:
    """The paper's result for a run with these settings (by dotted key), if it is one of the paper's experiments.

    Limits do not matter: a run that is stopped early is still the paper's experiment.
    """
    if any(settings.get(key) != value for key, value in SHARED.items()):
        return None
    if any(settings.get(key, value) != value for key, value in (ADAPTIVE | {"data.tokenizer": "words"}).items()):
        return None
    corpus, layer = settings["data.name"], settings["output.name"]
    width, layers = settings.get("model.hidden_size"), settings.get("model.layers")
    if (width, layers) == (512, 1):
        columns = {"text8": TEXT8, "europarl": EUROPARL.get(str(settings.get("data.language")), {})}
        return columns.get(corpus, {}).get(layer)
    if corpus == "one_billion_word" and layer == "adaptive" and width == 2048 and isinstance(layers, int):
        return ONE_BILLION_WORD.get(layers)
    return None
