"""Speed and communication cost of training on several processes (docs/scaling.md).

    python -m benchmarks.distributed --counts FILE

Two processes with one thread each are compared with one process with two threads: whole training steps including
batches, in turns, best wall-clock time of each. Then the all-reduce of the word table's gradient, by rows as `lm.optim`
does it and as a whole table; and the time the hosts need to agree on a number. "x": how many times faster than the
row above.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.harness import Child, Record, Seconds, Step, number, report, run, sized_parser, take_turns
from benchmarks.workloads import CPU, Workload, make_trainer
from lm.system.errors import UserError
from lm.system.ranks import Ranks

TRAINING, ALONE, TOGETHER, LEAVE = "training", "one process", "processes", "leave"
EXCHANGES = {"dense": 1, "rows": 20, "agreement": 200}
"""Repetitions of each exchange within a round."""


def main(words: Sequence[str]) -> int:
    parser = sized_parser(__doc__)
    parser.set_defaults(repeats=5)
    parser.add_argument("--ranks", type=number, default=2)
    parser.add_argument("--steps", type=number, default=5, help="training steps per round")
    parser.add_argument("--table", type=number, default=250_000, help="words of the table whose all-reduce is timed")
    return run(measure, parser, words)


def measure(arguments: argparse.Namespace) -> None:
    if arguments.streams % arguments.ranks:
        raise UserError(f"--streams must be a multiple of --ranks ({arguments.ranks}); got {arguments.streams}.")
    workload = Workload.from_arguments(arguments)
    with ExitStack() as stack:
        alone, together = (start_group(stack, workload, arguments, size) for size in (1, arguments.ranks))
        timers = {ALONE: partial(alone, TRAINING), TOGETHER: partial(together, TRAINING)}
        timers |= {name: partial(together, name) for name in EXCHANGES}
        seconds = take_turns(timers, repeats=arguments.repeats)
        alone(LEAVE)
        together(LEAVE)
    report(records({name: value.wall for name, value in seconds.items()}, workload, arguments), out=arguments.out)


def records(seconds: dict[str, float], workload: Workload, arguments: argparse.Namespace) -> Iterator[Record]:
    tokens, megabytes = arguments.steps * workload.tokens, arguments.table * arguments.embedding * 4 / 1e6
    dense, rows, agreement = (seconds[name] / times for name, times in EXCHANGES.items())
    for name, value, unit, factor in [
        (f"{arguments.ranks} threads", tokens / seconds[ALONE], "tokens/s", None),
        (f"{arguments.ranks} processes", tokens / seconds[TOGETHER], "tokens/s", seconds[ALONE] / seconds[TOGETHER]),
        (f"all-reduce of {arguments.table:,} rows", 1e3 * dense, "ms", None),
        (f"all-reduce of {workload.tokens:,} rows", 1e3 * rows, "ms", dense / rows),
        ("dense all-reduce", 1e3 * dense / megabytes, "ms per MB", None),
        ("row all-reduce", 1e6 * rows / workload.tokens, "us per row", None),
        ("agreement", 1e6 * agreement, "us", None),
    ]:
        yield {"measurement": name, "value": value, "unit": unit, "x": factor}


def start_group(
    stack: ExitStack, workload: Workload, arguments: argparse.Namespace, size: int
) -> Callable[[str], Seconds]:
    """Start `size` ranks as torchrun does; the result times a step on all of them."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on any free port
    stack.callback(lambda: store)  # keeps the store alive as long as the ranks
    variables = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    children = [
        stack.enter_context(Child(make_steps, variables | {"RANK": str(rank)}, workload, arguments))
        for rank in range(size)
    ]

    def seconds(name: str) -> Seconds:
        process, wall = zip(*[future.result() for future in [child.start(name) for child in children]], strict=True)
        return Seconds(sum(process), max(wall))

    return seconds


def make_steps(variables: dict[str, str], workload: Workload, arguments: argparse.Namespace) -> dict[str, Step]:
    """The steps of one rank."""
    os.environ.update(variables)
    ranks = Ranks.from_environment()
    torch.set_num_threads(max(1, arguments.ranks // ranks.size))
    ranks.join(CPU)
    grad_VE = torch.zeros(arguments.table, arguments.embedding)
    grad_NE = torch.zeros(workload.tokens, arguments.embedding)  # every token a different word
    steps: dict[str, Step] = {
        TRAINING: training(workload, arguments.steps, ranks),
        "dense": lambda: ranks.mean(grad_VE),
        "rows": lambda: ranks.mean(grad_NE),
        "agreement": lambda: ranks.all_max(0),
    }
    together = {name: partial(_synchronized, ranks, step, EXCHANGES.get(name, 1)) for name, step in steps.items()}
    return {**together, LEAVE: ranks.leave}


def _synchronized(ranks: Ranks, step: Step, times: int) -> None:
    """Start when all ranks are ready, return when all are done."""
    ranks.all_max(0)
    for _ in range(times):
        step()
    ranks.all_max(0)


def training(workload: Workload, steps: int, ranks: Ranks) -> Step:
    """`steps` training steps with their batches."""
    trainer = make_trainer(workload, ranks)
    batches = iter(trainer.batches())

    def train() -> None:
        for batch in islice(batches, steps):
            trainer.step(batch)
            ranks.agree(stop=0, seconds=0.0)
        ranks.last_agreement()

    return train


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
