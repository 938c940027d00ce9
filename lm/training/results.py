"""Write the results of runs without training steps: n-gram models and mixtures."""

from contextlib import closing
from typing import Any

from lm.config.validate import flatten
from lm.data.corpus import Corpus
from lm.model.scoring import Score
from lm.training.metrics import Metrics
from lm.training.run_dir import RunDir


def write_results(
    run_dir: RunDir,
    settings: dict[str, Any],
    position: dict[str, Any],
    scores: dict[str, Score],
    *,
    corpus: Corpus | None = None,
    metrics: dict[str, float] | None = None,
    more: dict[str, Any],
) -> None:
    """Write metrics, TensorBoard events and summary.json; `more` is merged into the summary.

    With a corpus, the summary adds unigram perplexity, perplexity per word and bits per character.
    """
    values = dict(metrics or {})
    summary: dict[str, Any] = {**position, "valid": {}, "test": {}}
    for split, score in scores.items():
        values |= {f"{split}/loss": score.loss, f"{split}/ppl": score.perplexity}
        summary[split] = dict.fromkeys(("last", "best"), score.perplexity)
        summary[f"{split}_without_unk"] = dict.fromkeys(("last", "best"), score.perplexity_without_unk)
        summary |= {"oov_rate": score.oov_rate, "evaluate_streams": score.streams}
        if corpus is not None:
            summary |= corpus.in_other_units(split, summary[split])
            summary[split]["unigram"] = corpus.unigram_perplexity(split)
    if corpus is not None:
        summary |= {"source": corpus.meta["source"], "corpus": corpus.hashes()}
    with closing(Metrics(run_dir.path, settings=flatten(settings))) as log:
        log.write({**position, **values})
        log.finish()
    run_dir.write_summary(summary | more)
