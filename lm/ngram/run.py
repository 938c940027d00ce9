"""`python -m lm.ngram`: count a corpus, score its splits and save a run.

Interrupted runs are not resumed: rerunning the command starts over and produces an identical checkpoint.
"""

import math
import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from lm.config.schema import Features, NgramConfig
from lm.data.corpus import Corpus, open_corpus
from lm.model.scoring import score
from lm.ngram.arpa import read_arpa, write_arpa
from lm.ngram.kneser_ney import Discounts, estimate, prune
from lm.ngram.model import STREAMS, CountModel, NgramModel, NgramPredictor
from lm.ngram.snm import EPOCHS, FEATURE_BYTES, SnmModel, feature_types, train_snm
from lm.ngram.trie import NGRAM_BYTES, count_ngrams, require_memory
from lm.system import checkpoint
from lm.system.console import Progress, duration, next_steps, say, table
from lm.system.errors import UserError
from lm.system.memory import GIB, peak_memory, reset_peak_memory, size_of
from lm.training.restore import pack_vocabulary
from lm.training.run_dir import RunDir, start_over, write_results

CPU = torch.device("cpu")


def run_ngrams(config: NgramConfig, *, overrides: list[str]) -> float:
    """Create the run; return the validation perplexity, for sweepers."""
    if config.out is not None and not Path(config.out).parent.is_dir():
        raise UserError(f"out={config.out} cannot be written: its folder does not exist. Try another out=PATH.")
    corpus = open_corpus(config.data)
    given = Path(config.run_dir) if config.run_dir is not None else None
    with closing(start_over(given, name=f"{config.data.name}-ngram", kind="ngram")) as run_dir:
        run_dir.write_settings(settings_of(config))
        with run_dir.record(overrides, device=CPU):
            return _make(config, corpus, run_dir)


def _make(config: NgramConfig, corpus: Corpus, run_dir: RunDir) -> float:
    reset_peak_memory(CPU)
    began, discounts = time.monotonic(), list[Discounts]()
    model: CountModel
    if config.features is not None:
        model = train(config.features, corpus)
    elif config.arpa is not None:
        model = read_arpa(Path(config.arpa), corpus.vocabulary, renormalize=config.renormalize)
        config = replace(config, order=model.order, min_counts=[1])
        run_dir.write_settings(settings_of(config))
    else:
        model, discounts = count(config, corpus)
    if config.prune:
        assert isinstance(model, NgramModel)
        before, model = model.num_ngrams, prune(model, config.prune)
        say(f"Pruned {before:,} n-grams to {model.num_ngrams:,}")
    seconds, memory = time.monotonic() - began, peak_memory(CPU)
    say(_sizes(model, discounts))
    if config.out is not None:  # before the run is complete, so that it can be repeated if this is interrupted
        assert isinstance(model, NgramModel)
        write_arpa(model, corpus.vocabulary, Path(config.out))
        say(f"Written in the ARPA format to {config.out}")
    predictor, scores = NgramPredictor(model), {}
    for split in ("valid", "test"):
        text = corpus.text(split)
        scores[split] = score(predictor, text, corpus.vocabulary, label=split, streams=STREAMS, batch_size=STREAMS)
    content = {
        "kind": "ngram",
        "config": asdict(config),
        "vocabulary": pack_vocabulary(corpus.vocabulary),
        "corpus": corpus.hashes(),
        "model": model.pack(),
    }
    checkpoint.save(content, run_dir.last)
    tokens = len(corpus.split("train"))
    position: dict[str, Any] = {"step": 1, "epoch": 1, "tokens": tokens, "train_seconds": round(seconds, 3)}
    position["eval_seconds"] = round(sum(s.seconds for s in scores.values()), 3)
    metrics = {"speed/tokens_per_s": tokens / max(seconds, 1e-9), "memory/peak_gib": memory / GIB}
    found = {split: dict.fromkeys(("last", "best"), s.perplexity) for split, s in scores.items()}
    more = {**corpus.summarize(found), "best_step": 1, "parameters": model.num_ngrams, "ngrams": model.sizes}
    more["discounts"] = [list(d) for d in discounts]
    write_results(run_dir, settings_of(config), position, scores, metrics=metrics, more=more)
    rows = [["unigram", *(f"{corpus.unigram_perplexity(split):.2f}" for split in scores)]]
    perplexities = [score.perplexity for score in scores.values()]
    rows.append([model.name, *(f"{value:.2f}" if math.isfinite(value) else "-" for value in perplexities)])
    say(table(rows, header=["perplexity", *scores]))
    made = "Read" if config.arpa else f"Counted {tokens:,} tokens"
    say(f"\n{made} in {duration(seconds)} with {size_of(memory)} of memory. Everything is in {run_dir.path}")
    say("\n".join(next_steps(run_dir.path)))
    return scores["valid"].perplexity


def settings_of(config: NgramConfig) -> dict[str, Any]:
    return {"kind": "ngram", **asdict(config)}


def count(config: NgramConfig, corpus: Corpus) -> tuple[NgramModel, list[Discounts]]:
    """Count the training text; return the model and each order's discounts."""
    vocabulary, tokens = corpus.vocabulary, _training_text(corpus)
    require_memory(
        NGRAM_BYTES * (config.order - 1) * len(tokens),
        doing=f"Counting {len(tokens):,} tokens with order={config.order}",
        fix=f"Try KenLM: lmplz -o {config.order} --limit_vocab_file WORDS < TEXT > FILE, then arpa=FILE.",
    )
    min_counts = [*config.min_counts, *[config.min_counts[-1]] * (config.order - len(config.min_counts))]
    with Progress(2 * config.order - 1, label="count", unit="passes") as progress:
        shared: dict[str, Any] = {"eos_id": vocabulary.eos_id, "advance": progress.advance}
        counts = count_ngrams(tokens, order=config.order, vocab_size=len(vocabulary), **shared)
        return estimate(counts, modified=config.discount == "modified", min_counts=min_counts, **shared)


def train(features: Features, corpus: Corpus) -> SnmModel:
    """Train a sparse non-negative matrix model."""
    tokens = _training_text(corpus)
    per_token = sum(len(kind.skipped) for kind in feature_types(features))
    require_memory(
        FEATURE_BYTES * per_token * len(tokens),
        doing=f"Counting {len(tokens):,} tokens with features={features}",
        fix="Try features=ngram5, or less text.",
    )
    with Progress(2 * len(feature_types(features)) + EPOCHS, label="count", unit="passes") as progress:
        return train_snm(tokens, features, vocabulary=corpus.vocabulary, advance=progress.advance)


def _training_text(corpus: Corpus) -> NDArray[Any]:
    tokens = corpus.split("train")
    say(f"corpus   {corpus.meta['source']}\n         {len(tokens):,} training tokens, {len(corpus.vocabulary):,} words")
    return tokens


def _sizes(model: CountModel, discounts: list[Discounts]) -> str:
    rows = []
    for order, size in enumerate(model.sizes, 1):
        taken = [f"{d:.3f}" for d in discounts[order - 1]] if discounts else []
        rows.append([order, f"{size:,}", *taken])
    return "\n" + table(rows, header=["order", "n-grams", *(["D1", "D2", "D3+"] if discounts else [])]) + "\n"
