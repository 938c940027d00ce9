"""`python -m lm.ngram`: count a corpus, score its splits, leave a run.

It is made in one go. Killed on the way, it is made again by the same command, with the same bytes in its checkpoint.
"""

import contextlib
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lm.config.schema import Discount, NgramConfig
from lm.config.validate import flatten, plain_values
from lm.data.corpus import Corpus
from lm.data.prepare import open_corpus
from lm.model.scoring import Score, score
from lm.ngram.arpa_reader import read_arpa
from lm.ngram.arpa_writer import write_arpa
from lm.ngram.counting import count_ngrams
from lm.ngram.kneser_ney import Discounts, estimate
from lm.ngram.model import NgramModel, pack_ngrams
from lm.ngram.predictor import STREAMS, NgramPredictor
from lm.system import checkpoint
from lm.system.console import Progress, duration, say, table
from lm.system.errors import UserError
from lm.system.memory import GIB, peak_memory, reset_peak_memory
from lm.training.metrics import Metrics
from lm.training.next_steps import next_steps
from lm.training.restore import pack_vocabulary
from lm.training.run_dir import RunDir, start_over

CPU = torch.device("cpu")


def run_ngrams(config: NgramConfig, *, overrides: list[str]) -> float:
    """The validation perplexity, for sweepers that minimise it."""
    if config.out is not None and not Path(config.out).parent.is_dir():
        raise UserError(f"out={config.out} cannot be written: its folder does not exist. Try another out=PATH")
    corpus = open_corpus(config.data)
    given = Path(config.run_dir) if config.run_dir is not None else None
    with contextlib.closing(start_over(given, name=f"{config.data.name}-ngram", kind="ngram")) as run_dir:
        run_dir.write_settings(settings_of(config))
        with run_dir.record(overrides, device=CPU):
            return _make(config, corpus, run_dir)


def _make(config: NgramConfig, corpus: Corpus, run_dir: RunDir) -> float:
    reset_peak_memory(CPU)
    began, discounts = time.monotonic(), list[Discounts]()
    if config.arpa is not None:
        model = read_arpa(Path(config.arpa), corpus.vocabulary)
        config = replace(config, order=model.order, min_counts=[1])
        run_dir.write_settings(settings_of(config))
    else:
        model, discounts = count(config, corpus)
    seconds = time.monotonic() - began
    say(_sizes(model, discounts))
    scores = {split: _score(model, corpus, split) for split in ("valid", "test")}
    content = {
        "kind": "ngram",
        "config": plain_values(config),
        "vocabulary": pack_vocabulary(corpus.vocabulary),
        "corpus": corpus.hashes(),
        "model": pack_ngrams(model),
    }
    checkpoint.save(content, run_dir.last)
    _write_figures(config, corpus, run_dir, model=model, discounts=discounts, scores=scores, seconds=seconds)
    if config.out is not None:
        write_arpa(model, corpus.vocabulary, Path(config.out))
        say(f"Written in the ARPA format to {config.out}")
    return scores["valid"].perplexity


def settings_of(config: NgramConfig) -> dict[str, Any]:
    return {"kind": "ngram", **plain_values(config)}


def count(config: NgramConfig, corpus: Corpus) -> tuple[NgramModel, list[Discounts]]:
    vocabulary, tokens = corpus.vocabulary, corpus.split("train")
    say(f"corpus   {corpus.meta['source']}\n         {len(tokens):,} training tokens, {len(vocabulary):,} words")
    least = [*config.min_counts, *[config.min_counts[-1]] * (config.order - len(config.min_counts))]
    with Progress(3 * config.order, label="count", unit="passes") as progress:
        advance = progress.advance
        sizes = {"vocab_size": len(vocabulary), "eos_id": vocabulary.eos_id}
        counts = count_ngrams(tokens, order=config.order, **sizes, advance=advance)
        return estimate(
            counts,
            modified=config.discount is Discount.modified,
            min_counts=least,
            eos_id=vocabulary.eos_id,
            notice=say,
            advance=advance,
        )


def _score(model: NgramModel, corpus: Corpus, split: str) -> Score:
    text = corpus.text(split)
    found = score(
        NgramPredictor(model),
        text.tokens,
        marks=text.marks,
        streams=STREAMS,
        batch_size=STREAMS,
        eos_id=corpus.vocabulary.eos_id,
        unk_id=corpus.vocabulary.unk_id,
        label=split,
    )
    assert found is not None, "without `stop` it is never stopped"
    return found


def _sizes(model: NgramModel, discounts: list[Discounts]) -> str:
    rows = []
    for order, size in enumerate(model.trie.sizes, 1):
        taken = [f"{d:.3f}" for d in discounts[order - 1]] if discounts else []
        rows.append([order, f"{size:,}", *taken])
    return "\n" + table(rows, header=["order", "n-grams", *(["D1", "D2", "D3+"] if discounts else [])]) + "\n"


def _write_figures(
    config: NgramConfig,
    corpus: Corpus,
    run_dir: RunDir,
    *,
    model: NgramModel,
    discounts: list[Discounts],
    scores: dict[str, Score],
    seconds: float,
) -> None:
    """Metrics, TensorBoard's events, the summary, and what is printed at the end."""
    tokens, valid, test = len(corpus.split("train")), scores["valid"], scores["test"]
    place = {"step": 1, "epoch": 1, "tokens": tokens, "train_seconds": round(seconds, 3)}
    place["eval_seconds"] = round(valid.seconds + test.seconds, 3)
    with contextlib.closing(Metrics(run_dir.path, settings=flatten(settings_of(config)))) as metrics:
        figures: dict[str, float] = {"speed/tokens_per_s": tokens / max(seconds, 1e-9)}
        for split, found in scores.items():
            figures |= {f"{split}/loss": found.loss, f"{split}/ppl": found.perplexity}
        metrics.write({**place, **figures, "memory/peak_gib": peak_memory(CPU) / GIB})
        metrics.finish()
    unigram = {split: corpus.unigram_perplexity(split) for split in scores}
    summary: dict[str, Any] = {**place, "best_step": 1}
    for split, found in scores.items():
        all_words = dict.fromkeys(("last", "best"), found.perplexity)
        known_words = dict.fromkeys(("last", "best"), found.perplexity_without_unk)
        summary |= {split: {**all_words, "unigram": unigram[split]}, f"{split}_without_unk": known_words}
        summary |= corpus.in_other_units(split, all_words)
    summary |= {"source": corpus.meta["source"], "corpus": corpus.hashes()}
    summary |= {"oov_rate": test.oov_rate, "evaluate_streams": test.streams, "parameters": len(model.log_probs_M)}
    run_dir.write_summary({**summary, "ngrams": model.trie.sizes, "discounts": [list(d) for d in discounts]})
    rows = [["unigram", *(f"{value:.2f}" for value in unigram.values())]]
    rows.append(
        [
            f"{model.order}-gram",
            *(f"{s.perplexity:.2f}" if math.isfinite(s.perplexity) else "-" for s in scores.values()),
        ]
    )
    say(table(rows, header=["perplexity", *scores]))
    made = "Read" if config.arpa else f"Counted {tokens:,} tokens"
    say(f"\n{made} in {duration(seconds)}. Everything is in {run_dir.path}")
    say("\n".join(next_steps(run_dir.path)))
