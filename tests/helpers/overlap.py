"""Overlap of held-out text with training text."""

import numpy as np

from lm.data.corpus import Corpus


def shared_12_grams(corpus: Corpus, split: str) -> float:
    """Return the fraction of a split's 12-grams that also occur in training."""

    def grams(name: str) -> list[bytes]:
        return [window.tobytes() for window in np.lib.stride_tricks.sliding_window_view(corpus.split(name), 12)]

    training, held_out = set(grams("train")), grams(split)
    return sum(gram in training for gram in held_out) / len(held_out)
