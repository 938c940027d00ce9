"""The whole training step, compared with a plain PyTorch step.

    python -m benchmarks.step --counts FILE --cutoffs 957,6567

Each stack runs in a separate process; they are timed in turns. All use the objective, clipping and Adagrad of
`experiment=text8`; only ours makes its batch inside the step. "PyTorch, default" is nn.Embedding with dense gradients,
nn.LSTM, nn.AdaptiveLogSoftmaxWithLoss (or a linear map with cross_entropy) and torch.optim.Adagrad. "PyTorch, tuned"
has fused Adagrad, sparse embedding gradients and the process settings of `train.py` (denormals, allocator). Both are
skipped for layers that torch does not have. With `--cutoffs auto`, tuned stacks with the released cutoffs run too.
"of peak": FLOP/s of the step, counting its matmuls only, as a share of those of one large matmul on the same threads,
in the same precision. "peak MiB": all memory of a step, including weights and optimizer.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from benchmarks import harness
from benchmarks import workloads as work
from benchmarks.harness import Record, print_records, run
from benchmarks.workloads import DEFAULT, OURS, PEAK, PEAK_SIZE, RELEASED, TUNED, Workload, stack_step
from lm.config.groups import plugin_names
from lm.data.batches import to_device
from lm.model.base import detach
from lm.system.console import say
from lm.system.devices import autocast, matmul_precision, prepare_cpu


def main(words: Sequence[str] | None = None) -> None:
    parser = harness.sized_parser(__doc__)
    parser.add_argument("--output", choices=plugin_names("output"), default="adaptive")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="measure time only")
    run(measure, parser, words)


def measure(arguments: argparse.Namespace) -> None:
    workload = Workload.from_arguments(arguments)
    stacks = [OURS, DEFAULT, TUNED] if arguments.output in ("adaptive", "full") else [OURS]
    if arguments.cutoffs == "auto" and arguments.output == "adaptive":
        stacks += [f"{TUNED} {cutoffs}" for cutoffs in RELEASED if cutoffs[-1] < len(workload.counts)]
    times = {"repeats": arguments.repeats, "threads": arguments.threads}
    seconds = harness.medians_apart(stack_step, [*stacks, PEAK], workload, **times)
    flops, peak = work.step_flops(workload), 2 * PEAK_SIZE**3 / seconds[PEAK]
    prepare_cpu(workload.threads)
    parts = Parts(workload)
    harness.interleaved_medians({"parts": parts}, **times)
    say(str(workload))
    print_records(parts.records())
    say(f"\nPeak: {1e-9 * peak:,.0f} GFLOP/s, by one large matmul; a step has {1e-9 * flops:.1f} GFLOP.")
    records = [
        {
            "step": name,
            "ms": 1e3 * seconds[name],
            "tokens/s": workload.tokens / seconds[name],
            "x ours": seconds[name] / seconds[OURS],
            "of peak": flops / seconds[name] / peak,
            "peak MiB": harness.peak_mib(stack_step, name, workload) if arguments.memory else None,
        }
        for name in stacks
    ]
    harness.report(records, out=arguments.out)


class Parts:
    """The trainer's step in parts: process time, wall-clock time of several threads, or a GPU's events."""

    def __init__(self, workload: Workload) -> None:
        self.clock = time.process_time if workload.threads == 1 else time.monotonic
        self.trainer = work.make_trainer(workload)
        self.make, self.device = self.trainer.batches().make, workload.device
        self.forward = partial(autocast, workload.config.trainer.precision, self.device)
        self.rounds: list[dict[str, float]] = []

    def __call__(self) -> None:
        names, stamps = ["loader"], [self._stamp()]
        with matmul_precision(self.trainer.config.trainer.precision):
            for name in self._step(len(self.rounds)):
                names.append(name)
                stamps.append(self._stamp())
        seconds = dict.fromkeys(names, 0.0)
        for name, (before, after) in zip(names[1:], pairwise(stamps), strict=True):
            if self.device.type == "cuda":
                after.synchronize()
            seconds[name] += before.elapsed_time(after) / 1e3 if self.device.type == "cuda" else after - before
        self.rounds.append(seconds)

    def _stamp(self) -> Any:
        if self.device.type != "cuda":
            return self.clock()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def records(self) -> list[Record]:
        """Time and share of each part; the loader runs in a separate thread and is not part of the step."""
        summarize = np.median if self.clock is time.process_time else np.min
        seconds = {part: float(summarize([r[part] for r in self.rounds[1:]])) for part in self.rounds[0]}
        whole = sum(seconds.values()) - seconds["loader"]
        return [{"part of our step": part, "ms": 1e3 * s, "share": s / whole} for part, s in seconds.items()]

    def _step(self, step: int) -> Iterator[str]:
        trainer, model = self.trainer, self.trainer.model
        batch = to_device(self.make(step), self.device)
        yield "loader"
        masks = trainer.dropout_masks()
        with self.forward():
            embedded_TBE = model.embed(batch.inputs_TB, batch.distinct, masks)
        yield "embedding"
        with self.forward():
            hidden_TBD, state = model.core(embedded_TBE, trainer.state, masks)
        yield "core"
        cut_TBD = hidden_TBD.detach().requires_grad_()
        with self.forward():
            loss = model.output.loss(cut_TBD, batch.targets_TB, batch.plans[0])
        loss.backward()  # type: ignore[no-untyped-call]
        yield "output"
        hidden_TBD.backward(cut_TBD.grad)
        trainer.state = detach(state)
        yield "core"
        trainer.optimizer.step(loss.detach(), lr=trainer.learning_rate, num_steps=len(batch.targets_TB))
        yield "clip and optimizer"


if __name__ == "__main__":
    main()
