"""`evaluate.normalize=false`: scores of a self-normalised layer taken for log-probabilities.

Scoring a word then reads one row of the output layer instead of all. Top-k and sampling stay exact. log Z is taken to
be its mean over the beginning of the validation text, not zero: dropout, which is there in training only, shifts it.
One place in `EVERY` is scored exactly too, to say how far the shortcut can be trusted.

Shapes: T steps, B streams, N places.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.model.base import State
from lm.model.language_model import LanguageModel
from lm.model.predictor import HiddenPredictions, Predictor
from lm.model.scoring import read_spans
from lm.output.base import IGNORE_INDEX
from lm.output.layers.full import JointSoftmax
from lm.system.errors import UserError

EVERY = 61
"""One place in this many is also scored exactly; a prime, so that all streams have their turn."""
CALIBRATING = 4096
"""Words of the validation text over which log Z is averaged."""


class Normalisers:
    """How far log Z is from what it is taken to be, at the places that were scored exactly too."""

    def __init__(self) -> None:
        self.taken = 0.0
        """What log Z is taken to be."""
        self.skip = 0
        """Places of the next chunk before the first that is scored exactly."""
        self.log_z: list[Tensor] = []
        self.nll: list[Tensor] = []

    def __str__(self) -> str:
        if not sum(map(len, self.nll)):
            return f"log Z is taken to be {self.taken:+.4f}; no place was scored both ways."
        log_z, nll = torch.cat(self.log_z).double(), torch.cat(self.nll).double()
        exact, taken = math.exp(float(nll.mean())), math.exp(float((nll - log_z).mean()))
        spread = float(log_z.std(correction=0))
        return (
            f"log Z is taken to be {self.taken:+.4f}. It is off by {float(log_z.mean()):+.4f} on average, "
            f"{float(log_z.abs().mean()):.4f} in absolute value (standard deviation {spread:.4f}). Where scored both "
            f"ways ({len(nll):,} places), perplexity is {taken:.2f} instead of {exact:.2f} ({taken / exact - 1:+.1%})"
        )


class Unnormalized(Predictor):
    """A model whose likelihoods are its scores, less a constant."""

    def __init__(self, model: Predictor, valid: NDArray[Any], *, eos_id: int, name: str) -> None:
        super().__init__()
        if not (isinstance(model, LanguageModel) and model.output.self_normalized):
            raise UserError(
                "evaluate.normalize=false needs a layer whose scores are trained to be log-probabilities "
                f"(output=self_normalized or nce); a model of {name} has none. Try evaluate.normalize=true"
            )
        self.model = model
        self.vocab_size, self.cutoffs, self.hidden_width = model.vocab_size, model.cutoffs, model.hidden_width
        self.normalisers = Normalisers()
        assert isinstance(model.output, JointSoftmax)
        self.layer = model.output
        self.normalisers.taken = self._calibrate(valid[:CALIBRATING], eos_id=eos_id)

    @torch.no_grad()
    def _calibrate(self, words: NDArray[Any], *, eos_id: int) -> float:
        """The mean of log Z over a text, less what the layer takes it to be."""
        total = 0.0
        for predictions, targets_TB, _ in read_spans(self.model, words, [(0, 0, len(words))], eos_id=eos_id):
            hidden_TBD = predictions.hidden
            assert hidden_TBD is not None
            difference = self.layer.nll(hidden_TBD, targets_TB) - self.layer.unnormalized_nll(hidden_TBD, targets_TB)
            total += float(difference.sum())
        return total / max(1, len(words))

    @property
    def device(self) -> torch.device:
        return self.model.device

    def initial_state(self, num_streams: int) -> State:
        return self.model.initial_state(num_streams)

    def read(self, words_TB: Tensor, state: State) -> tuple["UnnormalizedPredictions", State]:
        hidden_TBD, state = self.model(words_TB, state)
        return UnnormalizedPredictions(hidden_TBD, self.layer, self.normalisers), state

    def ids_of_unseen(self, words: Sequence[str]) -> list[int] | None:
        return self.model.ids_of_unseen(words)


class UnnormalizedPredictions(HiddenPredictions):
    """Exact but for the likelihoods."""

    def __init__(self, hidden: Tensor, output: JointSoftmax, normalisers: Normalisers) -> None:
        super().__init__(hidden, output)
        self.layer, self.normalisers = output, normalisers

    def at(self, steps_N: Tensor, streams_N: Tensor) -> "UnnormalizedPredictions":
        return UnnormalizedPredictions(self.hidden[steps_N, streams_N], self.layer, self.normalisers)

    def nll(self, targets: Tensor) -> Tensor:
        nll = self.layer.unnormalized_nll(self.hidden, targets) + self.normalisers.taken
        nll = nll.masked_fill(targets == IGNORE_INDEX, 0)
        checked = slice(self.normalisers.skip, None, EVERY)
        self.normalisers.skip = (self.normalisers.skip - targets.numel()) % EVERY
        hidden_ND, target_N = self.hidden.flatten(0, -2)[checked], targets.flatten()[checked]
        exact_N, scored_N = self.layer.nll(hidden_ND, target_N), target_N != IGNORE_INDEX
        self.normalisers.log_z.append((exact_N - nll.flatten()[checked])[scored_N])
        self.normalisers.nll.append(exact_N[scored_N])
        return nll
