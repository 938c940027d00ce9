"""Mixtures of models, p(w) = sum of weight_k p_k(w), optionally with a cache, and saving them as runs.

Shapes: K models, N tokens.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lm.config.inference import MixtureConfig, ModelChoice
from lm.config.validate import make_config
from lm.data.corpus import SplitText
from lm.inference.open_model import LoadedModel, from_content
from lm.model.base import State
from lm.model.language_model import count_parameters
from lm.model.predictor import Predictions, Predictor
from lm.model.scoring import Score, score_of, token_nll
from lm.output.base import IGNORE_INDEX
from lm.system import checkpoint
from lm.system.console import say, table
from lm.system.errors import UserError
from lm.training.restore import pack_vocabulary, unpack_vocabulary
from lm.training.run_dir import RunDir, write_results

if TYPE_CHECKING:
    from lm.inference.cache import CacheSettings

MIN_GAIN, MAX_ITERATIONS = 1e-7, 200
"""EM stops when an iteration gains less than this many nats per token, or after this many iterations."""
Likelihoods = dict[tuple[int, bytes], tuple[NDArray[np.float64], float]]
"""Negative log-likelihoods per token and the time to compute them, keyed by member and text hash."""


class Mixture(Predictor):
    """Interpolation of models with the same vocabulary; weights sum to one."""

    def __init__(self, members: Sequence[Predictor], weights: Sequence[float]) -> None:
        super().__init__()
        self.predictors, self.members, self.weights = list(members), nn.ModuleList(members), list(weights)
        self.vocab_size = members[0].vocab_size
        self.looks_back = max(member.looks_back for member in members)
        self.segment = next((member.segment for member in members if member.segment), None)
        self.hidden_width = next((m.hidden_width for m in members if m.hidden_width is not None), None)
        self.eval()

    def initial_state(self, num_streams: int) -> State:
        return [member.initial_state(num_streams) for member in self.predictors]

    def read(self, words_TB: Tensor, state: State) -> tuple[MixedPredictions, State]:
        parts = [member.read(words_TB.to(member.device), s) for member, s in zip(self.predictors, state, strict=True)]
        return MixedPredictions([part for part, _ in parts], self.weights, self.device), [after for _, after in parts]


class MixedPredictions(Predictions):
    """Weighted sums of the members' distributions, in float64."""

    def __init__(self, parts: Sequence[Predictions], weights: Sequence[float], device: torch.device) -> None:
        self.parts, self.weights, self.device = parts, weights, device
        self.hidden = next((part.hidden for part in parts if part.hidden is not None), None)

    def at(self, steps_N: Tensor, streams_N: Tensor) -> MixedPredictions:
        return MixedPredictions([part.at(steps_N, streams_N) for part in self.parts], self.weights, self.device)

    def nll(self, targets: Tensor) -> Tensor:
        mixed = self._mixed([-part.nll(targets) for part in self.parts])
        return torch.where(targets == IGNORE_INDEX, 0, -mixed)

    def log_prob(self) -> Tensor:
        return self._mixed([part.log_prob() for part in self.parts])

    def _mixed(self, log_probs: Sequence[Tensor]) -> Tensor:
        total = torch.full_like(log_probs[0], -torch.inf, dtype=torch.float64, device=self.device)
        for weight, values in zip(self.weights, log_probs, strict=True):
            if weight > 0:
                total = torch.logaddexp(total, values.to(self.device, torch.float64) + math.log(weight))
        return total


def fit_weights(log_probs_KN: NDArray[np.float64]) -> tuple[list[float], list[float]]:
    """Fit maximum-likelihood interpolation weights by EM, starting from equal weights.

    Also return the log-likelihood per token before each iteration and after the last one; it never decreases.
    """
    num_models = len(log_probs_KN)
    weights_K = np.full(num_models, 1 / num_models)
    best_N = log_probs_KN.max(0)
    relative_KN = np.exp(log_probs_KN - best_N)  # avoids underflow
    trace: list[float] = []
    while True:
        mixed_N = weights_K @ relative_KN
        trace.append(float((np.log(mixed_N) + best_N).mean()))
        if len(trace) > MAX_ITERATIONS or (len(trace) > 1 and trace[-1] - trace[-2] < MIN_GAIN):
            return weights_K.tolist(), trace
        updated_K = weights_K * (relative_KN / mixed_N).mean(1)
        weights_K = updated_K / updated_K.sum()


# ---- building a combined model from settings -------------------------------------------------------------------------


@dataclass(frozen=True)
class CombinedModel(LoadedModel):
    """A mixture or a single model, optionally with a cache. Other fields are the first model's."""

    weights: list[float] = field(default_factory=list)
    cache: CacheSettings | None = None
    fit_seconds: float = 0.0
    """Time to fit the weights and choose the cache."""
    known: Likelihoods = field(default_factory=dict)

    def scores(self, split: str, text: SplitText) -> dict[str, Score]:
        """Score each model, their mixture, and the model with the cache."""
        build = partial(score_of, text=text, vocabulary=self.vocabulary, streams=self.streams)
        scores: dict[str, Score] = {}
        read = [self._nll(i, text) for i in range(len(self.parts))]
        for i, (part, (nll, seconds)) in enumerate(zip(self.parts, read, strict=True)):
            name = part.label if part.label not in scores else f"{part.label} ({i + 1})"
            scores[name] = build(nll, model=part.model, seconds=seconds)
        if len(self.parts) > 1:
            with np.errstate(divide="ignore"):
                logs = [np.log(weight) - nll for (nll, _), weight in zip(read, self.weights, strict=True)]
            mixed, seconds = -np.logaddexp.reduce(logs), sum(seconds for _, seconds in read)
            scores["mixture"] = build(mixed, model=self.model, seconds=seconds)
        if self.cache is not None:
            scores[f"with cache={self.cache.kind}"] = self.score(split, text)
        return scores

    def _nll(self, i: int, text: SplitText) -> tuple[NDArray[np.float64], float]:
        """Return one member's negative log-likelihoods per token, and the time they took; computed once per text."""
        key = i, hashlib.sha256(text.tokens.tobytes()).digest()
        if key not in self.known:
            began, part = time.monotonic(), self.parts[i]
            nll = token_nll(part.model, text.tokens, **self.reading(part.name))
            self.known[key] = nll, time.monotonic() - began
        return self.known[key]

    def fitted_weights(self) -> list[float]:
        """Fit the weights by EM on the validation text."""
        text = self.validation_text()
        weights, trace = fit_weights(np.stack([-self._nll(i, text)[0] for i in range(len(self.parts))]))
        say(f"Weights fitted by EM on the validation text, {len(trace) - 1} iterations:")
        perplexities = " -> ".join(f"{np.exp(-value):.3f}" for value in (*trace[:3], trace[-1]))
        shown = ", ".join(f"{part.name} {weight:.4f}" for part, weight in zip(self.parts, weights, strict=True))
        say(f"  {shown}; perplexity {perplexities}")
        return weights

    def settings(self) -> dict[str, Any]:
        """Describe the combination, for JSON."""
        names = [part.name for part in self.parts]
        return {"mixed": names, "weights": self.weights, "cache": self.cache and self.cache.as_dict()}

    def gains_table(self, rows: dict[str, dict[str, Score]]) -> str:
        """Table of perplexities by split for each model and combination, with the gain over the best model."""
        lines, num_models = [], len(self.parts)
        for i, name in enumerate(next(iter(rows.values()))):
            cells = [f"{self.weights[i]:.4f}" if 1 < num_models > i else ""]
            for scores in rows.values():
                best = min(score.perplexity for score in list(scores.values())[:num_models])
                gain = 1 - scores[name].perplexity / best
                cells += [f"{scores[name].perplexity:.2f}", f"{gain:z.1%}" if i >= num_models else ""]
            lines.append([name, *cells])
        return table(lines, header=["model", "weight", *(cell for split in rows for cell in (split, "gain"))])


def combine(members: list[LoadedModel], config: ModelChoice) -> CombinedModel:
    """Mix the models and add the cache. Unset values are fitted on the first run's validation text."""
    check_vocabularies(members)
    began, first = time.monotonic(), members[0]
    weights = config.weights or [1 / len(members)] * len(members)
    tags = tuple(Path(member.name).resolve().name for member in members[1:])
    combined = CombinedModel(**{**vars(first), "tags": tags, "parts": members}, weights=weights)
    if len(members) > 1 and config.weights is None:
        combined = replace(combined, weights=combined.fitted_weights())
    combined = replace(combined, model=mix(members, combined.weights))
    if config.cache is not None:
        from lm.inference.cache import Cached, choose_cache

        cache = choose_cache(config, combined)
        tags = (*combined.tags, f"cache-{cache.kind}")
        combined = replace(combined, model=Cached(combined.model, cache), cache=cache, tags=tags)
    return replace(combined, tags=(*combined.tags, *first.tags), fit_seconds=time.monotonic() - began)


def mix(members: Sequence[LoadedModel], weights: Sequence[float]) -> Predictor:
    """Return a mixture of the models, or the model itself if there is only one."""
    return Mixture([member.model for member in members], weights) if len(members) > 1 else members[0].model


def check_vocabularies(members: Sequence[LoadedModel]) -> None:
    first, *others = members
    for other in others:
        if other.vocabulary.hash != first.vocabulary.hash:
            raise UserError(
                f"Mixed models must have the same vocabulary, including counts; {first.file} has "
                f"{len(first.vocabulary):,} words, {other.file} has {len(other.vocabulary):,}, and they differ. "
                "Train or count both with the same data settings."
            )


# ---- saving as a run -------------------------------------------------------------------------------------------------


def save_as_run(combined: CombinedModel, run_dir: RunDir, *, boundary: str | None, scores: dict[str, Score]) -> None:
    """Save the combined model as a run; its checkpoint contains copies of the members' checkpoints."""
    cache = combined.cache
    config = MixtureConfig(
        data=combined.data,
        runs=[str(part.folder) for part in combined.parts],
        weights=combined.weights,
        streams=combined.streams,
        cache=cache.kind if cache else None,
        **{f"cache_{key}": getattr(cache, key, None) for key in ("size", "sharpness", "weight")},
        cache_boundary=boundary,
    )
    settings = {"kind": "mixture", **asdict(config)}
    run_dir.write_settings(settings)
    content = {
        "kind": "mixture",
        "config": asdict(config),
        "vocabulary": pack_vocabulary(combined.vocabulary),
        "corpus": combined.content["corpus"],
        "members": [part.content for part in combined.parts],
    }
    checkpoint.save(content, run_dir.last)
    with run_dir.record([], device=combined.model.device):
        # Nothing was trained; the time is spent on fitting.
        position = {"step": 0, "epoch": 0, "tokens": 0, "train_seconds": round(combined.fit_seconds, 3)}
        num_ngrams = sum(getattr(module, "num_ngrams", 0) for module in combined.model.modules())
        num_parameters = count_parameters(combined.model) + num_ngrams
        summary = {"parameters": num_parameters, "corpus": combined.content["corpus"]}
        write_results(run_dir, settings, position, scores, metrics={}, more=summary)
        say(f"\nSaved as a run in {run_dir.path}")


def from_mixture(content: dict[str, Any], *, file: Path, device: torch.device) -> LoadedModel:
    """Load the model from a mixture's checkpoint."""
    config, vocabulary = make_config(content["config"], MixtureConfig), unpack_vocabulary(content)
    members = [from_content(member, file=file, device=device) for member in content["members"]]
    check_vocabularies(members)
    model = mix(members, config.weights)
    title = " + ".join(f"{weight:.3f} x ({m.title})" for weight, m in zip(config.weights, members, strict=True))
    if config.cache is not None:
        from lm.inference.cache import Cached, saved_cache

        model = Cached(model, saved_cache(config, vocabulary))
        title += f", cache={config.cache}"
    return LoadedModel(model, vocabulary, config.data, config.streams, title, file, content)
