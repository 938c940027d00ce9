"""From settings to one model: open runs, fit the weights of their mixture, choose a cache, keep it as a run."""

import contextlib
import hashlib
import time
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

import numpy as np
import torch
from numpy.typing import NDArray

from lm.config.inference import CacheKind, MixtureConfig, ModelChoice
from lm.config.validate import flatten, plain_values
from lm.data.corpus import SplitText
from lm.inference.cache import CacheSettings
from lm.inference.cache_choice import NAMES, SHARPNESS, SIZES, trials_table, try_caches
from lm.inference.mixture import fit_weights
from lm.inference.open_model import Opened, boundary_id, check_vocabularies, open_model, put_together
from lm.inference.unnormalized import Unnormalized
from lm.model.language_model import count_parameters
from lm.model.predictor import Predictor
from lm.model.scoring import Score, token_nll
from lm.ngram.predictor import NgramPredictor
from lm.system import checkpoint
from lm.system.console import say
from lm.system.errors import UserError
from lm.training.metrics import Metrics
from lm.training.provenance import add_start
from lm.training.restore import pack_vocabulary
from lm.training.run_dir import RunDir


@dataclass
class Combination:
    """Models that are mixed, or one alone, perhaps with a cache."""

    members: list[Opened]
    names: list[str]
    weights: list[float]
    streams: int
    batch_size: int
    cache: CacheSettings | None = None
    notices: TextIO | None = None
    """Where to say what was fitted, if not on standard output."""
    seconds: float = 0.0
    """Time it took to fit the weights and to choose the cache."""
    _known: dict[tuple[int, bytes], tuple[NDArray[np.float64], float]] = field(default_factory=dict)
    """Likelihoods that were computed before, by member and text, and the time it took."""

    @property
    def first(self) -> Opened:
        return self.members[0]

    @property
    def model(self) -> Predictor:
        return put_together(self.members, self.weights, self.cache)

    @property
    def is_plain(self) -> bool:
        return len(self.members) == 1 and self.cache is None

    def cache_values(self) -> dict[str, Any] | None:
        """For JSON."""
        cache = self.cache
        if cache is None:
            return None
        chosen = {"size": cache.size, NAMES[cache.kind]: cache.sharpness, "weight": cache.weight}
        return {"kind": cache.kind.value, **chosen}

    def validation_text(self) -> SplitText:
        """Of the first run's corpus, to fit to."""
        return self.first.corpus(splits=["valid"], notices=self.notices).text("valid")

    def reading(self, label: str) -> dict[str, Any]:
        """How splits are read, for `score` and `token_nll`."""
        eos_id = self.first.vocabulary.eos_id
        return {"streams": self.streams, "batch_size": self.batch_size, "eos_id": eos_id, "label": label}

    def nll(self, number: int, text: SplitText) -> tuple[NDArray[np.float64], float]:
        """Of each token by one member, and the seconds it took; a text is read only once."""
        key = number, hashlib.sha256(text.tokens.tobytes()).digest()
        if key not in self._known:
            began, reading = time.monotonic(), self.reading(self.names[number])
            nll = token_nll(self.members[number].model, text.tokens, to=self.notices, **reading)
            self._known[key] = nll, time.monotonic() - began
        return self._known[key]

    def mixed_nll(self, text: SplitText) -> tuple[NDArray[np.float64], float]:
        """The same for the mixture without the cache."""
        found = [self.nll(number, text) for number in range(len(self.members))]
        with np.errstate(divide="ignore"):
            logs = [np.log(weight) - nll for (nll, _), weight in zip(found, self.weights, strict=True)]
        return -np.logaddexp.reduce(logs), sum(seconds for _, seconds in found)


def combine(
    config: ModelChoice,
    *,
    device: str,
    batch_size: int = 64,
    streams: int | None = None,
    normalize: bool = True,
    notices: TextIO | None = None,
) -> Combination:
    """The model that the settings ask for. What is fitted is fitted to the validation text of the first run."""
    assert config.checkpoint is not None
    names = [config.checkpoint, *config.mix]
    members = [open_model(name, device=device, which=config.which, verify=config.verify) for name in names]
    check_vocabularies(members)
    weights = config.weights or [1 / len(members)] * len(members)
    found = Combination(members, names, weights, streams or members[0].streams, batch_size, notices=notices)
    if not normalize:
        valid, eos_id = found.validation_text().tokens, found.first.vocabulary.eos_id
        found.members = [
            replace(member, model=Unnormalized(member.model, valid, eos_id=eos_id, name=name))
            for member, name in zip(members, names, strict=True)
        ]
    if config.cache is CacheKind.continuous and found.model.hidden_width is None:
        raise UserError("cache=continuous compares hidden states, and n-grams have none. Try cache=unigram")
    began = time.monotonic()
    if len(members) > 1 and config.weights is None:
        text = found.validation_text()
        found.weights, trace = fit_weights(np.stack([-found.nll(number, text)[0] for number in range(len(members))]))
        say(f"Weights by EM on the validation text, {len(trace) - 1} iterations:", to=notices)
        perplexities = ", ".join(f"{np.exp(-value):.3f}" for value in (*trace[:3], trace[-1]))
        shown = ", ".join(f"{name} {weight:.4f}" for name, weight in zip(names, found.weights, strict=True))
        say(f"  {shown}; perplexity {perplexities.replace(', ', ' -> ')}", to=notices)
    if config.cache is not None:
        found.cache = _choose_cache(config, found)
    found.seconds = time.monotonic() - began
    return found


def _choose_cache(config: ModelChoice, found: Combination) -> CacheSettings:
    assert config.cache is not None
    given = config.cache_theta if config.cache is CacheKind.continuous else config.cache_decay
    boundary = boundary_id(config.cache_boundary, found.first.vocabulary)
    if config.cache_size is not None and given is not None and config.cache_weight is not None:
        return CacheSettings(config.cache, config.cache_size, given, config.cache_weight, boundary)
    trials = try_caches(
        found.model,
        found.validation_text().tokens,
        kind=config.cache,
        sizes=SIZES if config.cache_size is None else [config.cache_size],
        sharpness=SHARPNESS[config.cache] if given is None else [given],
        weight=config.cache_weight,
        boundary=boundary,
        to=found.notices,
        **found.reading("caches"),
    )
    say(f"cache={config.cache.value}, chosen on the validation text:\n{trials_table(trials)}\n", to=found.notices)
    return min(trials, key=lambda trial: trial.perplexity).settings


# ---- keeping it as a run, for later use and for comparisons ----------------------------------------------------------


def keep(found: Combination, run: RunDir, *, boundary: str | None, scores: dict[str, Score]) -> None:
    """The run's checkpoint holds copies of the members' own, so that it needs none of them any more."""
    config = _config(found, boundary=boundary)
    run.write_settings({"kind": "mixture", **plain_values(config)})
    add_start(run.path, device=str(found.model.device), threads=torch.get_num_threads())
    content = {
        "kind": "mixture",
        "config": plain_values(config),
        "vocabulary": pack_vocabulary(found.first.vocabulary),
        "corpus": found.first.content["corpus"],
        "members": [member.content for member in found.members],
    }
    checkpoint.save(content, run.last)
    _write_figures(found, run, config, scores=scores)
    say(f"\nKept as a run in {run.path}")


def _config(found: Combination, *, boundary: str | None) -> MixtureConfig:
    cache = found.cache
    return MixtureConfig(
        data=found.first.data,
        runs=[str(member.folder) for member in found.members],
        weights=found.weights,
        streams=found.streams,
        cache=cache.kind if cache else None,
        cache_size=cache.size if cache else None,
        cache_sharpness=cache.sharpness if cache else None,
        cache_weight=cache.weight if cache else None,
        cache_boundary=boundary,
    )


def _write_figures(found: Combination, run: RunDir, config: MixtureConfig, *, scores: dict[str, Score]) -> None:
    settings = flatten({"kind": "mixture", **plain_values(config)})
    # Nothing is trained; the time is that of fitting.
    place = {"step": 0, "epoch": 0, "tokens": 0, "train_seconds": round(found.seconds, 3)}
    with contextlib.closing(Metrics(run.path, settings=settings)) as metrics:
        metrics.write({**place, **{f"{split}/ppl": score.perplexity for split, score in scores.items()}})
        metrics.finish()
    splits = {split: {"last": s.perplexity, "best": s.perplexity} for split, s in scores.items()}
    known = {f"{s}_without_unk": dict.fromkeys(("last", "best"), f.perplexity_without_unk) for s, f in scores.items()}
    parameters = sum(num_parameters(member) for member in found.members)
    corpus = found.first.content["corpus"]
    run.write_summary({**place, "valid": {}, "test": {}, **splits, **known, "parameters": parameters, "corpus": corpus})


def num_parameters(opened: Opened) -> int:
    """Weights, and of n-grams their number."""
    ngrams = [module for module in opened.model.modules() if isinstance(module, NgramPredictor)]
    return count_parameters(opened.model) + sum(len(predictor.model.log_probs_M) for predictor in ngrams)
