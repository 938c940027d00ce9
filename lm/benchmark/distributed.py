"""`what=distributed`: what several processes gain and what they have to tell each other (docs/scaling.md).

Two processes with one thread each are set against one process with two threads: whole training steps, batches
included, in turns, the best of each by the clock on the wall, since a busy machine can make a round slower but never
faster. Then what the ranks exchange: the word table's rows of a step, as `lm.optim` does, against the table as a whole;
and what it takes the hosts to agree on a number.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from lm.benchmark.counts import CountsSettings
from lm.benchmark.measure import Step
from lm.benchmark.rows import Row, write_rows
from lm.benchmark.stacks import bare_trainer, drawn_streams
from lm.benchmark.workers import Workers
from lm.config.command_line import compose
from lm.config.commands import TrainConfig
from lm.data.batches import BatchLoader
from lm.data.text.vocabulary import EOS, UNK, Vocabulary
from lm.output.clusters.partition import check_cutoffs
from lm.runs.assembly import build_model
from lm.system.console import say, table
from lm.system.errors import UserError
from lm.system.ranks import Ranks

BPTT = 20
TRAINING, ALONE, TOGETHER = "training", "one process", "processes"
MEGA = 1e6
EPOCH = 50
"""Steps of the made-up training text."""
EXCHANGES = {"dense": 1, "rows": 20, "agreement": 200}
"""How often each is repeated within a round."""


@dataclass
class DistributedSettings(CountsSettings):
    """Keys of `what=distributed`."""

    cutoffs: list[int] = field(default_factory=lambda: [2000, 10_000])
    width: int = 512
    embedding: int = 256
    tokens: int = 2560
    """Tokens of a step, over all ranks, in streams of 20: the paper's 128."""
    ranks: int = 2
    steps: int = 5
    """Training steps of a round."""
    table: int = 250_000
    """Words of the table whose exchange is timed."""
    repeats: int = 5
    out: str = "benchmark.json"


def run_distributed(settings: DistributedSettings) -> None:
    """Measure, print, write."""
    if settings.tokens % (BPTT * settings.ranks):
        near = max(1, settings.tokens // (BPTT * settings.ranks)) * BPTT * settings.ranks
        raise UserError(
            f"tokens must be a multiple of {BPTT} times ranks ({settings.ranks}); got {settings.tokens}. "
            f"Try tokens={near}"
        )
    counts = settings.read_counts()
    check_cutoffs(settings.cutoffs, vocab_size=len(counts))
    seconds = time_in_turns(settings, counts)
    rows = list(report(settings, seconds, vocab_size=len(counts)))
    cells = [[r["name"], f"{r['value']:,.3g}", r["unit"], f"{r['ratio']:.2f}" if r["ratio"] else ""] for r in rows]
    say(table(cells, header=["what", "value", "unit", "ratio"]))
    write_rows(rows, settings.out)


def time_in_turns(settings: DistributedSettings, counts: NDArray[np.int64]) -> dict[str, float]:
    """Fewest seconds of a round of each piece of work, after an untimed one; nothing runs beside it."""
    overrides = [
        f"model.embedding_size={settings.embedding}",
        f"model.hidden_size={settings.width}",
        f"output.cutoffs={settings.cutoffs}",
        f"trainer.batch_size={settings.tokens // BPTT}",
        f"trainer.bptt={BPTT}",
    ]
    config = compose(overrides, name="train", schema=TrainConfig)
    say(f"{len(counts):,} words: {settings.ranks} processes, and one with {settings.ranks} threads")
    work = partial(make_work, config, counts, settings)
    with Workers(work, size=1, threads=settings.ranks) as alone, Workers(work, size=settings.ranks, threads=1) as ranks:
        turns = {ALONE: (alone, TRAINING), TOGETHER: (ranks, TRAINING), **{name: (ranks, name) for name in EXCHANGES}}
        seconds: dict[str, list[float]] = {name: [] for name in turns}
        for _ in range(settings.repeats + 1):
            for name, (workers, work_name) in turns.items():
                seconds[name].append(workers.seconds(work_name))
    return {name: min(values[1:]) for name, values in seconds.items()}


def report(settings: DistributedSettings, seconds: dict[str, float], *, vocab_size: int) -> Iterator[Row]:
    """As records; `ratio` says how many times as fast as what the name says."""
    base = f"distributed/{vocab_size}"
    tokens = settings.steps * settings.tokens
    alone, together = tokens / seconds[ALONE], tokens / seconds[TOGETHER]
    yield {"name": f"{base}/{settings.ranks}_threads", "value": alone, "unit": "tokens/s", "ratio": None}
    name = f"{base}/{settings.ranks}_processes_against_threads"
    yield {"name": name, "value": together, "unit": "tokens/s", "ratio": together / alone}
    each = {name: seconds[name] / times for name, times in EXCHANGES.items()}
    base = f"distributed/{settings.table}"
    megabytes = settings.table * settings.embedding * 4 / MEGA
    yield {"name": f"{base}/dense_exchange", "value": 1e3 * each["dense"], "unit": "ms", "ratio": None}
    name = f"{base}/row_exchange_against_dense"
    yield {"name": name, "value": 1e3 * each["rows"], "unit": "ms", "ratio": each["dense"] / each["rows"]}
    name = "distributed/dense_exchange"
    yield {"name": name, "value": 1e3 * each["dense"] / megabytes, "unit": "ms per MB", "ratio": None}
    name = "distributed/row_exchange"
    yield {"name": name, "value": 1e6 * each["rows"] / settings.tokens, "unit": "us per row", "ratio": None}
    yield {"name": "distributed/agreement", "value": 1e6 * each["agreement"], "unit": "us", "ratio": None}


# ---- what a rank is asked to do ----------------------------------------------------------------------------------


def make_work(
    config: TrainConfig, counts: NDArray[np.int64], settings: DistributedSettings, ranks: Ranks
) -> Mapping[str, Step]:
    return {
        TRAINING: training(config, counts, settings.steps, ranks),
        **exchanging(settings.table, settings.tokens, settings.embedding, ranks),
    }


def training(config: TrainConfig, counts: NDArray[np.int64], steps: int, ranks: Ranks) -> Step:
    """So many steps of a trainer, on words drawn by their counts."""
    words = (EOS, UNK, *(f"w{number}" for number in range(len(counts) - 2)))
    vocabulary = Vocabulary(words, counts)
    model = build_model(config, vocabulary)
    streams = drawn_streams(config, counts, num_batches=EPOCH)
    trainer = bare_trainer(model, config=config, streams=streams, ranks=ranks)
    loader = BatchLoader(streams, model.output.plans, seed=config.seed, start=0, pin=False, columns=trainer.columns)
    batches = iter(loader)

    def train() -> None:
        for batch in islice(batches, steps):
            trainer.train_step(batch)
            ranks.agree(stop=0, seconds=0.0)
        ranks.last_agreement()

    return train


def exchanging(num_words: int, num_rows: int, width: int, ranks: Ranks) -> Mapping[str, Step]:
    """The mean over ranks of a table's gradient, whole or of the rows of a step, each token a row of its own."""
    grad_VE, grad_UE = torch.zeros(num_words, width), torch.zeros(num_rows, width)
    once = {
        "dense": lambda: ranks.mean(grad_VE),
        "rows": lambda: ranks.mean(grad_UE),
        "agreement": lambda: ranks.all_max(0),
    }
    return {name: partial(_repeat, once[name], times) for name, times in EXCHANGES.items()}


def _repeat(step: Step, times: int) -> None:
    for _ in range(times):
        step()
