"""`what=distributed`: speed and communication cost of training on several processes (docs/scaling.md).

Two processes with one thread each are compared with one process with two threads: whole training steps including
batches, in turns, best wall-clock time of each. Then the exchange of the word table's gradient between ranks, once by
rows as `lm.optim` does it, once as a whole table; and the time the hosts need to agree on a number.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lm.benchmark.arguments import CountsSettings, fill
from lm.benchmark.measure import Child, Row, Seconds, Step, Work, row, take_turns, write_rows
from lm.benchmark.stacks import StepWorkload, make_trainer
from lm.cli import compose_config as compose
from lm.config.schema import TrainConfig
from lm.system.console import say, table
from lm.system.errors import UserError
from lm.system.ranks import Ranks

BPTT = 20
TRAINING, ALONE, TOGETHER, LEAVE = "training", "one process", "processes", "leave"
MEGA = 1e6
EXCHANGES = {"dense": 1, "rows": 20, "agreement": 200}
"""Repetitions of each exchange within a round."""


@dataclass
class DistributedSettings(CountsSettings):
    """Keys of `what=distributed`."""

    embedding: int = 256
    tokens: int = 2560
    """Tokens per step over all ranks, in streams of 20: the paper's 128."""
    ranks: int = 2
    steps: int = 5
    """Training steps per round."""
    table: int = 250_000
    """Words of the table whose exchange is timed."""
    repeats: int = 5


def main(pairs: dict[str, str]) -> None:
    settings = fill(DistributedSettings, pairs)
    if settings.tokens % (BPTT * settings.ranks):
        near = max(1, settings.tokens // (BPTT * settings.ranks)) * BPTT * settings.ranks
        raise UserError(
            f"tokens must be a multiple of {BPTT} times ranks ({settings.ranks}); got {settings.tokens}. "
            f"Try tokens={near}"
        )
    counts = settings.read_counts()
    rows = list(report(settings, measure(settings, counts), vocab_size=len(counts)))
    cells = [[r["name"], f"{r['value']:,.3g}", r["unit"], f"{r['ratio']:.2f}" if r["ratio"] else ""] for r in rows]
    say(table(cells, header=["what", "value", "unit", "ratio"]))
    write_rows(rows, settings.out)


def measure(settings: DistributedSettings, counts: NDArray[np.int64]) -> dict[str, float]:
    """Best wall-clock seconds of a round of each kind of work."""
    overrides = [
        f"model.embedding_size={settings.embedding}",
        f"model.hidden_size={settings.width}",
        f"trainer.batch_size={settings.tokens // BPTT}",
        f"trainer.bptt={BPTT}",
    ]
    config = compose(overrides, name="train", schema=TrainConfig)
    workload = StepWorkload(counts, settings.cutoffs, "adaptive", config, threads=settings.ranks)
    say(f"{len(counts):,} words: {settings.ranks} processes, and one with {settings.ranks} threads")
    with ExitStack() as stack:
        start = partial(start_group, stack, workload, settings)
        alone, together = start(1), start(settings.ranks)
        timers = {ALONE: partial(alone, TRAINING), TOGETHER: partial(together, TRAINING)}
        timers |= {name: partial(together, name) for name in EXCHANGES}
        seconds = take_turns(timers, repeats=settings.repeats)
        alone(LEAVE)
        together(LEAVE)
    return {name: value.wall for name, value in seconds.items()}


def report(settings: DistributedSettings, seconds: dict[str, float], *, vocab_size: int) -> Iterator[Row]:
    """`ratio`: how many times faster than what the name says."""
    base, large, ranks = f"distributed/{vocab_size}", f"distributed/{settings.table}", settings.ranks
    alone, together = (settings.steps * settings.tokens / seconds[name] for name in (ALONE, TOGETHER))
    yield row(f"{base}/{ranks}_threads", alone, "tokens/s")
    yield row(f"{base}/{ranks}_processes_against_threads", together, "tokens/s", together / alone)
    dense, rows, agreement = (seconds[name] / times for name, times in EXCHANGES.items())
    yield row(f"{large}/dense_exchange", 1e3 * dense, "ms")
    yield row(f"{large}/row_exchange_against_dense", 1e3 * rows, "ms", dense / rows)
    megabytes = settings.table * settings.embedding * 4 / MEGA
    yield row("distributed/dense_exchange", 1e3 * dense / megabytes, "ms per MB")
    yield row("distributed/row_exchange", 1e6 * rows / settings.tokens, "us per row")
    yield row("distributed/agreement", 1e6 * agreement, "us")


# ---- groups of ranks -----------------------------------------------------------------------------------------------


def start_group(
    stack: ExitStack, workload: StepWorkload, settings: DistributedSettings, size: int
) -> Callable[[str], Seconds]:
    """Start `size` ranks as torchrun does; the result times a kind of work on all of them."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on any free port
    stack.callback(lambda: store)  # keeps the store alive as long as the ranks
    variables = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    children = [
        stack.enter_context(Child(make_work, variables | {"RANK": str(rank)}, workload, settings))
        for rank in range(size)
    ]

    def seconds(name: str) -> Seconds:
        found = [future.result() for future in [child.start(name) for child in children]]
        return Seconds(sum(s.process for s in found), max(s.wall for s in found))

    return seconds


def make_work(variables: dict[str, str], workload: StepWorkload, settings: DistributedSettings) -> dict[str, Step]:
    """What a rank can be asked to do."""
    os.environ.update(variables)
    ranks = Ranks.from_environment()
    torch.set_num_threads(settings.ranks // ranks.size)
    ranks.join(torch.device("cpu"))
    grad_VE = torch.zeros(settings.table, settings.embedding)
    grad_UE = torch.zeros(settings.tokens, settings.embedding)  # every token another word
    work: Work = {
        TRAINING: training(workload, settings.steps, ranks),
        "dense": lambda: ranks.mean(grad_VE),
        "rows": lambda: ranks.mean(grad_UE),
        "agreement": lambda: ranks.all_max(0),
    }
    together = {name: partial(_on_all, ranks, step, EXCHANGES.get(name, 1)) for name, step in work.items()}
    return {**together, LEAVE: ranks.leave}


def _on_all(ranks: Ranks, step: Step, times: int) -> None:
    """From when all ranks have begun until all are done."""
    ranks.all_max(0)
    for _ in range(times):
        step()
    ranks.all_max(0)


def training(workload: StepWorkload, steps: int, ranks: Ranks) -> Step:
    """`steps` training steps on words drawn in proportion to their counts."""
    trainer = make_trainer(workload, ranks=ranks)
    batches = iter(trainer.loader())

    def train() -> None:
        for batch in islice(batches, steps):
            trainer.train_step(batch)
            ranks.agree(stop=0, seconds=0.0)
        ranks.last_agreement()

    return train
