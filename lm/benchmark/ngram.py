"""`what=ngram`: time and memory of counting a prepared corpus, and the speed of scoring text with the result.

One process does it all on one core, from nothing. Process time is reported, because it ignores other processes.
"""

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lm.benchmark.arguments import fill
from lm.benchmark.measure import MIB, row, write_rows
from lm.config.schema import Discount
from lm.data.corpus import Corpus
from lm.inference.scoring import score
from lm.ngram.counting import MOST_ORDER, count_ngrams
from lm.ngram.kneser_ney import estimate
from lm.ngram.predictor import NgramPredictor
from lm.system.console import say, table
from lm.system.errors import UserError
from lm.system.memory import peak_memory

CPU = torch.device("cpu")
STREAMS = 16


@dataclass
class NgramSettings:
    """Keys of `what=ngram`."""

    corpus: str = ""
    """The folder of a prepared corpus, such as data/text8-min11."""
    order: int = 5
    discount: str = "modified"
    """single or modified."""
    out: str = "benchmark.json"


def main(pairs: dict[str, str]) -> None:
    settings = fill(NgramSettings, pairs)
    if not Path(settings.corpus).is_dir() or not settings.corpus:
        raise UserError(
            f"corpus must name the folder of a prepared corpus; got {settings.corpus!r}. Try corpus=data/NAME"
        )
    if settings.order > MOST_ORDER:
        raise UserError(f"order must be at most {MOST_ORDER}; got {settings.order}. Try order=5")
    if settings.discount not in (names := [discount.value for discount in Discount]):
        raise UserError(f"discount must be one of {', '.join(names)}; got {settings.discount!r}. Try discount=modified")
    Corpus.open(Path(settings.corpus))  # or it is refused here, not in the child
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(measure, settings).result()
    say(f"{found['tokens']:,.0f} tokens, {found['n-grams']:,.0f} n-grams; one process, process time")
    rows = [
        row("ngram/count", found["count"], "s"),
        row("ngram/estimate", found["estimate"], "s"),
        row("ngram/count_and_estimate", found["count"] + found["estimate"], "s"),
        row("ngram/peak_memory", found["peak"] / MIB, "MiB"),
        row("ngram/score", found["scored"] / found["score"], "tokens/s"),
    ]
    say(table([[r["name"], f"{r['value']:,.1f}", r["unit"]] for r in rows], header=["figure", "value", "unit"]))
    say(f"validation perplexity {found['perplexity']:.2f}")
    write_rows(rows, settings.out)


def measure(settings: NgramSettings) -> dict[str, float]:
    """Compiling is not counted: a tiny text is counted and scored first."""
    torch.set_num_threads(1)
    corpus = Corpus.open(Path(settings.corpus))
    vocabulary, train, valid = corpus.vocabulary, corpus.split("train"), corpus.split("valid")
    modified, eos_id = settings.discount == Discount.modified.value, vocabulary.eos_id
    reading: dict[str, Any] = {"streams": STREAMS, "batch_size": STREAMS, "unk_id": vocabulary.unk_id}
    for number in (1000, None):
        times = [time.process_time()]
        counts = count_ngrams(train[:number], order=settings.order, vocab_size=len(vocabulary), eos_id=eos_id)
        times.append(time.process_time())
        model, _ = estimate(counts, modified=modified, min_counts=[1] * settings.order, eos_id=eos_id)
        times.append(time.process_time())
        peak = peak_memory(CPU)
        result = score(NgramPredictor(model), valid[:number], label="valid", eos_id=eos_id, **reading)
        times.append(time.process_time())
    assert result is not None
    seconds = dict(zip(("count", "estimate", "score"), np.diff(times).tolist(), strict=True))
    sizes = {"tokens": len(train), "n-grams": len(model.log_probs_M), "scored": len(valid)}
    return {**seconds, **sizes, "peak": peak, "perplexity": result.perplexity}
