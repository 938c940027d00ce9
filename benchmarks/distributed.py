"""Speed and communication cost of training on several processes (docs/scaling.md).

    python -m benchmarks.distributed --counts FILE

Two processes with one thread each are compared with one process with two threads: whole training steps including
batches, in turns, best wall-clock time of each. Then the all-reduce of the word table's gradient, by rows as `lm.optim`
does it and as a whole table; and the time the hosts need to agree on a number. "x": how many times faster than the
row above.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks import harness
from benchmarks.harness import Record, Seconds, Step, run, start_child
from benchmarks.workloads import CPU, Workload, make_trainer
from lm.system.errors import UserError
from lm.system.ranks import Ranks

TRAINING, ALONE, TOGETHER, LEAVE = "training", "one process", "processes", "leave"
RANKS, STEPS, ROWS = 2, 5, 250_000
"""Processes, training steps per round, rows of the table that is all-reduced as a whole."""
EXCHANGES = {"dense": 1, "rows": 20, "agreement": 200}
"""Repetitions of each exchange within a round."""


def main(words: Sequence[str] | None = None) -> None:
    parser = harness.sized_parser(__doc__)
    parser.set_defaults(repeats=5)
    run(measure, parser, words)


def measure(arguments: argparse.Namespace) -> None:
    if arguments.streams % RANKS:
        raise UserError(f"--streams must be even; got {arguments.streams}.")
    workload = Workload.from_arguments(arguments)
    with ExitStack() as stack:
        alone, together = (start_group(stack, workload, size) for size in (1, RANKS))
        timers = {ALONE: partial(alone, TRAINING), TOGETHER: partial(together, TRAINING)}
        timers |= {name: partial(together, name) for name in EXCHANGES}
        seconds = harness.take_turns(timers, repeats=arguments.repeats)
        alone(LEAVE)
        together(LEAVE)
    harness.report(records({name: s.wall for name, s in seconds.items()}, workload), out=arguments.out)


def records(seconds: dict[str, float], workload: Workload) -> Iterator[Record]:
    tokens, megabytes = STEPS * workload.tokens, ROWS * workload.config.model.embedding_size * 4 / 1e6
    dense, rows, agreement = (seconds[name] / times for name, times in EXCHANGES.items())
    for name, value, unit, factor in [
        (f"{RANKS} threads", tokens / seconds[ALONE], "tokens/s", None),
        (f"{RANKS} processes", tokens / seconds[TOGETHER], "tokens/s", seconds[ALONE] / seconds[TOGETHER]),
        (f"all-reduce of {ROWS:,} rows", 1e3 * dense, "ms", None),
        (f"all-reduce of {workload.tokens:,} rows", 1e3 * rows, "ms", dense / rows),
        ("dense all-reduce", 1e3 * dense / megabytes, "ms per MB", None),
        ("row all-reduce", 1e6 * rows / workload.tokens, "us per row", None),
        ("agreement", 1e6 * agreement, "us", None),
    ]:
        yield {"measurement": name, "value": value, "unit": unit, "x": factor}


def start_group(stack: ExitStack, workload: Workload, size: int) -> Callable[[str], Seconds]:
    """Start `size` ranks like torchrun; return a function that times a step on all of them."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on any free port
    stack.callback(lambda: store)  # keeps the store alive as long as the ranks
    variables = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ranks = [variables | {"RANK": str(rank)} for rank in range(size)]
    children = [stack.enter_context(start_child(make_steps, rank, workload)) for rank in ranks]

    def seconds(name: str) -> Seconds:
        running = [child.submit(harness.time_held, name) for child in children]
        process, wall = zip(*(future.result() for future in running), strict=True)
        return Seconds(sum(process), max(wall))

    return seconds


def make_steps(variables: dict[str, str], workload: Workload) -> Callable[[str], None]:
    """Make the steps of one rank, by name."""
    os.environ.update(variables)
    ranks = Ranks.from_environment()
    torch.set_num_threads(RANKS // ranks.size)
    ranks.join(CPU)
    grad_VE = torch.zeros(ROWS, workload.config.model.embedding_size)
    grad_NE = grad_VE[: workload.tokens].clone()  # every token a different word
    trainer = make_trainer(workload, ranks)
    batches = iter(trainer.batches())

    def train() -> None:
        for batch in islice(batches, STEPS):
            trainer.step(batch)
            ranks.agree(stop=0, seconds=0.0)
        ranks.last_agreement()

    steps: dict[str, Step] = {
        TRAINING: train,
        "dense": lambda: ranks.mean(grad_VE),
        "rows": lambda: ranks.mean(grad_NE),
        "agreement": lambda: ranks.all_max(0),
    }

    def synchronized(name: str) -> None:
        """Start when all ranks are ready, return when all are done."""
        ranks.all_max(0)
        for _ in range(EXCHANGES.get(name, 1)):
            steps[name]()
        ranks.all_max(0)

    return lambda name: ranks.leave() if name == LEAVE else synchronized(name)


if __name__ == "__main__":
    main()
