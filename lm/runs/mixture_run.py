"""Keep a mixture, or a model with a cache, as a run: for later use and for comparisons."""

import contextlib

from lm.config.commands import MixtureConfig
from lm.config.validate import flatten, plain_values
from lm.inference.scoring import Score
from lm.model.language_model import count_parameters
from lm.ngram.predictor import NgramPredictor
from lm.runs.assembly import pack_vocabulary
from lm.runs.combining import Combination
from lm.runs.directory import RunDir
from lm.runs.opening import Opened
from lm.system.console import say
from lm.training import checkpoint
from lm.training.metrics import Metrics


def keep(found: Combination, run: RunDir, *, boundary: str | None, scores: dict[str, Score]) -> None:
    """The run's checkpoint holds copies of the members' own, so that it needs none of them any more."""
    config = _config(found, boundary=boundary)
    run.write_settings({"kind": "mixture", **plain_values(config)})
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
        runs=found.names,
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
    run.write_summary({**place, "valid": {}, "test": {}, **splits, **known, "parameters": parameters})


def num_parameters(opened: Opened) -> int:
    """Weights, and of n-grams their number."""
    ngrams = [module for module in opened.model.modules() if isinstance(module, NgramPredictor)]
    return count_parameters(opened.model) + sum(len(predictor.model.log_probs_M) for predictor in ngrams)
