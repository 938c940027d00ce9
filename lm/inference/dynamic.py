"""Dynamic evaluation (Krause et al., 2018): a neural model that keeps learning from the text it reads.

The text is read in order, in segments. Each segment is scored first; then its gradient g updates the weights:

    sgd:  w -= lr g
    rms:  w -= lr g / (rms + epsilon) + decay (rms / mean rms) (w - trained w)

where rms is the root mean square of each weight's gradient on training text. A weight's decay is at most 1.

Shapes: T steps of a segment, 1 stream.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.config.inference import DynamicKind, ScoringOverrides
from lm.inference.open_model import LoadedModel
from lm.model.base import State
from lm.model.language_model import LanguageModel
from lm.model.predictor import Predictions, Predictor
from lm.model.scoring import perplexity, token_nll
from lm.output.base import IGNORE_INDEX
from lm.system.console import say, table
from lm.system.errors import UserError
from lm.system.randomness import generator_for

RATES = {"sgd": (0.03, 0.1, 0.3, 1.0), "rms": (1e-4, 3e-4, 1e-3, 3e-3)}
DECAYS = {"sgd": (0.0,), "rms": (0.0, 0.001, 0.01)}
"""Values to try."""
TUNING_TOKENS = 20_000
"""Tokens of the validation text for each try."""
RMS_SEGMENTS = 500
"""Segments of the training text, evenly spaced, for the gradients' root mean square."""
EPSILON = 1.0
"""Added to the root mean squares, as a multiple of their mean."""


@dataclass(frozen=True)
class DynamicSettings:
    """Hyperparameters of dynamic evaluation."""

    kind: DynamicKind
    lr: float
    decay: float
    """Pull towards the trained weights at every segment; 0 for `sgd`."""
    segment: int
    """Number of tokens between updates."""


class Dynamic(Predictor):
    """A model that learns from the words of each `read` when the next `read` begins.

    Predictions must be used before the next `read`, which changes the weights. `initial_state` restores the trained
    weights.
    """

    def __init__(self, model: LanguageModel, settings: DynamicSettings, rms: Sequence[Tensor] = ()) -> None:
        """`rms` holds each parameter's root mean square gradient, for the kind of that name."""
        super().__init__()
        self.model, self.settings, self.segment = model, settings, settings.segment
        self.vocab_size, self.cutoffs, self.hidden_width = model.vocab_size, model.cutoffs, model.hidden_width
        self.weights = list(model.parameters())
        for weight in self.weights:
            weight.requires_grad_()  # rows of sparse tables too
        self.trained, self.rms, self.num_updates = [weight.detach().clone() for weight in self.weights], rms, 0
        total = sum(float(values.double().sum()) for values in rms)
        self.mean_rms = total / sum(values.numel() for values in rms) if rms else 1.0
        self.eval()

    @torch.no_grad()
    def initial_state(self, num_streams: int) -> State:
        """Restore the trained weights and return the state before the first word."""
        assert num_streams == 1, "one text changes the weights"
        for weight, trained in zip(self.weights, self.trained, strict=True):
            weight.copy_(trained)
        self.model.eval()  # drops vectors computed from other weights
        state = self.model.initial_state(1)
        return {"model": state, "before": state, "words": torch.empty(0, 1, dtype=torch.long, device=self.device)}

    def read(self, words_T1: Tensor, state: State) -> tuple[Predictions, State]:
        """Learn from the words of the last `read`, then return predictions after each new word."""
        if len(state["words"]):
            targets_T1 = torch.cat([state["words"][1:], words_T1[:1]])
            self.learn(state["words"], targets_T1, state["before"])
        predictions, after = self.model.read(words_T1, state["model"])
        return predictions, {"model": after, "before": state["model"], "words": words_T1}

    def learn(self, words_T1: Tensor, targets_T1: Tensor, state: State) -> None:
        """Update the weights once, by the gradient of the mean loss on these words."""
        grads, lr, decay = self.gradient(words_T1, targets_T1, state), self.settings.lr, self.settings.decay
        self.num_updates += 1
        with torch.no_grad():
            if self.settings.kind == "sgd":
                for weight, grad in zip(self.weights, grads, strict=True):
                    weight.sub_(grad, alpha=lr)
                return
            for weight, grad, rms, trained in zip(self.weights, grads, self.rms, self.trained, strict=True):
                if decay:
                    weight.lerp_(trained, (rms * (decay / self.mean_rms)).clamp_(max=1))
                weight.addcdiv_(grad, rms + EPSILON * self.mean_rms, value=-lr)

    @torch.enable_grad()
    def gradient(self, words_T1: Tensor, targets_T1: Tensor, state: State) -> Sequence[Tensor]:
        """Return the gradient of the mean training loss, without dropout, for each parameter."""
        model, history = self.model, words_T1
        if model.maxent is not None:
            state, history = state["core"], torch.cat([state["words"], words_T1])
        targets_T1 = targets_T1.masked_fill(targets_T1 >= self.vocab_size, IGNORE_INDEX)  # unknown to the output layer
        generator = generator_for(0, "dynamic evaluation", self.num_updates)
        (plan,) = model.plan_output(targets_T1.cpu(), [slice(0, 1)], words_PB=history.cpu(), generator=generator)
        model.core.train()  # cuDNN computes gradients of recurrent layers only in training mode
        (loss, *_), _ = model.loss(model.input(words_T1), targets_T1, state, plan=plan.to(self.device))
        grads = torch.autograd.grad(loss, self.weights, allow_unused=True, materialize_grads=True)
        model.eval()
        return grads


def make_dynamic(members: Sequence[LoadedModel], config: ScoringOverrides) -> list[LoadedModel]:
    """Make the neural models dynamic, each with its own rates; unset ones are tuned on validation text."""
    if not any(isinstance(member.model, LanguageModel) for member in members):
        names = ", ".join(str(member.file) for member in members)
        raise UserError(f"evaluate.dynamic needs a neural model; got {names}. Try evaluate.dynamic=null.")
    return [_dynamic(member, config) if isinstance(member.model, LanguageModel) else member for member in members]


def _dynamic(loaded: LoadedModel, config: ScoringOverrides) -> LoadedModel:
    kind, model = config.dynamic, loaded.model
    assert kind is not None and isinstance(model, LanguageModel)
    rates = RATES[kind] if config.dynamic_lr is None else [config.dynamic_lr]
    decays = DECAYS[kind] if config.dynamic_decay is None else [config.dynamic_decay]
    choices = [DynamicSettings(kind, lr, decay, config.dynamic_segment) for lr, decay in product(rates, decays)]
    dynamic = Dynamic(model, choices[0])
    if kind == "rms":
        train = loaded.corpus(["train"]).text("train").tokens
        dynamic = Dynamic(model, choices[0], gradient_rms(dynamic, train, eos_id=loaded.vocabulary.eos_id))
    if len(choices) > 1:
        tokens = loaded.validation_text().tokens[:TUNING_TOKENS]
        found = [(_try(dynamic, choice, tokens, loaded), choice) for choice in choices]
        _, best = min(found, key=lambda trial: trial[0])
        rows = [[f"{c.lr:g}", f"{c.decay:g}", f"{ppl:.2f}", "best" if c is best else ""] for ppl, c in found]
        say(f"evaluate.dynamic={kind} of {loaded.name}, chosen on the first {len(tokens):,} validation tokens:")
        say(table(rows, header=["lr", "decay", "valid ppl", ""]) + "\n")
        dynamic.settings = best
    say(f"Dynamic evaluation of {loaded.name}: {kind}, lr {dynamic.settings.lr:g}, decay {dynamic.settings.decay:g}.")
    return replace(loaded, model=dynamic, tags=(*loaded.tags, f"dynamic-{kind}"))


def _try(dynamic: Dynamic, choice: DynamicSettings, tokens: NDArray[Any], loaded: LoadedModel) -> float:
    """Return the perplexity of a text with these settings; inf if the weights diverge."""
    dynamic.settings = choice
    label = f"lr {choice.lr:g}, decay {choice.decay:g}"
    found = perplexity(float(token_nll(dynamic, tokens, **loaded.reading(label)).sum()), len(tokens))
    return math.inf if math.isnan(found) else found


@torch.no_grad()
def gradient_rms(dynamic: Dynamic, tokens: NDArray[Any], *, eos_id: int) -> list[Tensor]:
    """Return the root mean square of each weight's gradient over segments of the training text."""
    length = dynamic.settings.segment
    squares = [torch.zeros_like(weight) for weight in dynamic.weights]
    starts = np.unique(np.linspace(0, max(0, len(tokens) - 2 * length), RMS_SEGMENTS).astype(np.int64))
    for start in starts:
        text = torch.from_numpy(tokens[start : start + 2 * length].astype(np.int64)).to(dynamic.device)[:, None]
        words_T1 = torch.cat([torch.full_like(text[:1], eos_id), text[:-1]])
        # The first half gives the second one a state.
        half = len(text) // 2
        _, state = dynamic.model.read(words_T1[:half], dynamic.model.initial_state(1))
        for square, grad in zip(squares, dynamic.gradient(words_T1[half:], text[half:], state), strict=True):
            square.addcmul_(grad, grad, value=1 / len(starts))
    return [square.sqrt_() for square in squares]
