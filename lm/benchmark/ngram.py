"""`what=ngram`: time and memory of counting a prepared corpus, and the speed of scoring text with the result.

One process does it all on one core, from nothing. Process time is reported, because it ignores other processes.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from lm.benchmark.arguments import fill
from lm.benchmark.measure import MIB, row, timed, write_rows
from lm.config.commands import Discount
from lm.data.corpus import Corpus
from lm.inference.scoring import score
from lm.ngram.counting import MOST_ORDER, Counts, count_ngrams
from lm.ngram.kneser_ney import estimate
from lm.ngram.model import NgramModel
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
    counts: list[Counts] = []
    models: list[NgramModel] = []
    found: list[float] = []

    def count(number: int | None) -> None:
        eos_id = vocabulary.eos_id
        text = train[:number]
        counts[:] = [count_ngrams(text, order=settings.order, vocab_size=len(vocabulary), eos_id=eos_id)]

    def smooth() -> None:
        min_counts = [1] * settings.order
        modified = settings.discount == Discount.modified.value
        models[:] = [estimate(counts[0], modified=modified, min_counts=min_counts, eos_id=vocabulary.eos_id)[0]]

    def read(number: int | None) -> None:
        result = score(
            NgramPredictor(models[0]),
            valid[:number],
            streams=STREAMS,
            batch_size=STREAMS,
            eos_id=vocabulary.eos_id,
            unk_id=vocabulary.unk_id,
            label="valid",
        )
        assert result is not None
        found[:] = [result.perplexity]

    count(1000)
    smooth()
    read(1000)
    seconds = {"count": timed(lambda: count(None)), "estimate": timed(smooth)}
    peak = peak_memory(CPU)
    seconds["score"] = timed(lambda: read(None))
    sizes = {"tokens": len(train), "n-grams": len(models[0].log_probs_M), "scored": len(valid)}
    return {name: value.process for name, value in seconds.items()} | sizes | {"peak": peak, "perplexity": found[0]}
