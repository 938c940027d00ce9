"""An n-gram model as a predictor: its state is the last few words.

Shapes: T steps, B streams, C = order - 1 words before a place.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.model.base import State
from lm.model.predictor import Predictions, Predictor
from lm.ngram.model import NO_WORD, NgramModel
from lm.output.base import IGNORE_INDEX

STREAMS = 16
"""Pieces that a split is cut into; the number does not change the result of n-grams."""


class NgramPredictor(Predictor):
    """Computes on the host, in doubles."""

    def __init__(self, model: NgramModel) -> None:
        super().__init__()
        self.model = model
        self.vocab_size = model.vocab_size
        self.num_ngrams = len(model.log_probs_M)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def initial_state(self, num_streams: int) -> State:
        return torch.full((self.model.order - 1, num_streams), NO_WORD)

    def read(self, words_TB: Tensor, state: State) -> tuple["NgramPredictions", State]:
        text = torch.cat([state, words_TB.cpu()])
        # Windows of C words that end with each of the words read, turned round: the last word comes first.
        recent_TBC = (
            text.unfold(0, len(state), 1)[1:].flip(-1) if len(state) else words_TB.new_empty(*words_TB.shape, 0)
        )
        return NgramPredictions(recent_TBC, self.model), text[len(words_TB) :]


class NgramPredictions(Predictions):
    """`recent` are the words before each place, the last one first, (..., C)."""

    def __init__(self, recent: Tensor, model: NgramModel) -> None:
        self.recent, self.model = recent, model

    def at(self, steps_N: Tensor, streams_N: Tensor) -> "NgramPredictions":
        return NgramPredictions(self.recent[steps_N, streams_N], self.model)

    def nll(self, targets: Tensor) -> Tensor:
        flat = targets.cpu().flatten()
        scored = (flat != IGNORE_INDEX).numpy()
        nll = np.zeros(len(flat))
        nll[scored] = -self.model.score(self._rows()[scored], flat.numpy()[scored])
        return torch.from_numpy(nll).view(targets.shape)

    def log_prob(self) -> Tensor:
        log_prob = torch.from_numpy(self.model.distributions(self._rows()))
        return log_prob.view(*self.recent.shape[:-1], -1)

    def _rows(self) -> NDArray[np.int64]:
        rows: NDArray[np.int64] = self.recent.flatten(0, -2).contiguous().numpy()
        return rows
