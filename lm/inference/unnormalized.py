"""`evaluate.normalize=false`: use a self-normalized layer's scores as log-probabilities.

Scoring a word then reads one row of the output layer instead of all. Top-k and sampling stay exact. log Z is estimated
as its mean over the start of the validation text, because dropout, active only in training, shifts it from zero. One
in `EVERY` positions of a chunk is also scored exactly, to report the approximation error.

Shapes: T steps, B streams, N positions.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.inference.open_model import LoadedModel
from lm.model.base import State
from lm.model.language_model import LanguageModel
from lm.model.predictor import HiddenPredictions, Predictor
from lm.model.scoring import read_spans
from lm.output.base import IGNORE_INDEX
from lm.output.layers.full import JointSoftmax
from lm.system.errors import UserError

EVERY = 61
"""One in this many positions is also scored exactly; a prime, so that all streams are sampled."""
CALIBRATION_WORDS = 4096
"""Number of validation words for averaging log Z."""


def unnormalized(loaded: LoadedModel, valid: NDArray[Any]) -> LoadedModel:
    """Return the model for `evaluate.normalize=false`, calibrated on validation text."""
    model = Unnormalized(loaded.model, valid, eos_id=loaded.vocabulary.eos_id, name=loaded.name)
    return replace(loaded, model=model, tags=(*loaded.tags, "unnormalized"))


class Unnormalized(Predictor):
    """A model whose log-likelihoods are raw scores minus a constant."""

    def __init__(self, model: Predictor, valid: NDArray[Any], *, eos_id: int, name: str) -> None:
        super().__init__()
        if not (isinstance(model, LanguageModel) and model.output.self_normalized):
            raise UserError(
                "evaluate.normalize=false needs a layer whose scores are trained to be log-probabilities "
                f"(output=self_normalized or nce); {name} has another layer. Try evaluate.normalize=true."
            )
        self.model = model
        self.vocab_size, self.cutoffs, self.hidden_width = model.vocab_size, model.cutoffs, model.hidden_width
        assert isinstance(model.output, JointSoftmax)
        self.layer = model.output
        self.eval()
        self.estimate = self._calibrate(valid[:CALIBRATION_WORDS], eos_id=eos_id)
        """Estimate of log Z."""
        self.exact: list[tuple[Tensor, Tensor]] = []
        """Error of log Z, and negative log-likelihood, at exactly scored positions."""

    def report(self) -> str:
        """Describe the estimate of log Z and its error."""
        log_z, nll = (
            (torch.cat(each).double() for each in zip(*self.exact, strict=True)) if self.exact else [Tensor()] * 2
        )
        if not len(nll):
            return f"log Z is estimated as {self.estimate:+.4f}; no position was scored both ways."
        exact, estimated = math.exp(float(nll.mean())), math.exp(float((nll - log_z).mean()))
        spread = float(log_z.std(correction=0))
        return (
            f"log Z is estimated as {self.estimate:+.4f}. The mean error is {float(log_z.mean()):+.4f}, "
            f"{float(log_z.abs().mean()):.4f} in absolute value (standard deviation {spread:.4f}). On {len(nll):,} "
            f"positions scored both ways, perplexity is {estimated:.2f} instead of {exact:.2f} "
            f"({estimated / exact - 1:+.1%})."
        )

    @torch.no_grad()
    def _calibrate(self, words: NDArray[Any], *, eos_id: int) -> float:
        """Return the mean log Z over a text, minus the value assumed by the layer."""
        total = 0.0
        for predictions, targets_TB, _ in read_spans(self.model, words, [(0, 0, len(words))], eos_id=eos_id):
            hidden_TBD = predictions.hidden
            assert hidden_TBD is not None
            difference = self.layer.nll(hidden_TBD, targets_TB) - self.layer.unnormalized_nll(hidden_TBD, targets_TB)
            total += float(difference.sum())
        return total / max(1, len(words))

    def initial_state(self, num_streams: int) -> State:
        return self.model.initial_state(num_streams)

    def read(self, words_TB: Tensor, state: State) -> tuple["UnnormalizedPredictions", State]:
        hidden_TBD, state = self.model(words_TB, state)
        return UnnormalizedPredictions(hidden_TBD, self), state

    def ids_of_unseen(self, words: Sequence[str]) -> list[int] | None:
        return self.model.ids_of_unseen(words)


class UnnormalizedPredictions(HiddenPredictions):
    """Predictions with approximate likelihoods; everything else is exact."""

    def __init__(self, hidden: Tensor, model: Unnormalized) -> None:
        super().__init__(hidden, model.layer)
        self.model = model

    def at(self, steps_N: Tensor, streams_N: Tensor) -> "UnnormalizedPredictions":
        return UnnormalizedPredictions(self.hidden[steps_N, streams_N], self.model)

    def nll(self, targets: Tensor) -> Tensor:
        model, layer = self.model, self.model.layer
        nll = (layer.unnormalized_nll(self.hidden, targets) + model.estimate).masked_fill(targets == IGNORE_INDEX, 0)
        hidden_ND, target_N = self.hidden.flatten(0, -2)[::EVERY], targets.flatten()[::EVERY]
        exact_N, scored_N = layer.nll(hidden_ND, target_N), target_N != IGNORE_INDEX
        model.exact.append(((exact_N - nll.flatten()[::EVERY])[scored_N], exact_N[scored_N]))
        return nll
