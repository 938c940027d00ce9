"""The measured steps: our layers and training steps, and the same in plain PyTorch.

Shapes: T steps, B streams, N = T B tokens, E width of the embedding, D of the hidden state, V vocabulary size.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness import Step, numbers, read_counts
from lm.cli import compose_config as compose
from lm.config.schema import TrainConfig
from lm.data.batches import Streams, to_device
from lm.data.text.vocabulary import EOS, UNK, Vocabulary
from lm.model.base import State, detach
from lm.model.language_model import build_model
from lm.optim.optimizers.adagrad import EPSILON, AdagradConfig
from lm.optim.sparse_table import SparseTable
from lm.output.base import OutputLayer, build_output
from lm.output.clusters.choice import choose_clusters
from lm.system.devices import autocast, matmul_precision, prepare_cpu
from lm.system.ranks import Ranks
from lm.training.trainer import Trainer

NUM_BATCHES = 8
"""Different batches that the steps cycle through."""
OURS, DEFAULT, TUNED, PEAK = "ours", "PyTorch, default", "PyTorch, tuned", "peak"
TORCH_ADAPTIVE = "torch_adaptive"
PEAK_SIZE = 2048
"""Size of the square matmul that defines peak speed."""
RELEASED = ([2000, 10_000], [4000, 40_000, 200_000], [20_000, 60_000])
"""Cutoffs that the paper's authors, and Baevski and Auli, used."""
CPU = torch.device("cpu")

TORCH_CORES: dict[str, Callable[..., nn.Module]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn": nn.RNN,
    "irnn": partial(nn.RNN, nonlinearity="relu"),
}
"""Cores that torch also has, as one layer without projection."""


@dataclass(frozen=True)
class Workload:
    """Sizes, settings and text of a training step, the same for every candidate."""

    counts: NDArray[np.int64]
    cutoffs: list[int]
    config: TrainConfig
    threads: int = 1
    device: torch.device = CPU

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> "Workload":
        sizes = [
            f"model.embedding_size={arguments.embedding}",
            f"model.hidden_size={arguments.width}",
            f"trainer.batch_size={arguments.streams}",
            f"trainer.bptt={arguments.bptt}",
        ]
        precision = f"trainer.precision={arguments.precision}"
        config = compose(["experiment=text8", *sizes, precision], name="train", schema=TrainConfig)
        workload = cls(read_counts(arguments), [], config, arguments.threads)
        cutoffs = arguments.cutoffs if arguments.cutoffs != "auto" else workload.automatic_cutoffs()
        return replace(workload, cutoffs=cutoffs).using("output", getattr(arguments, "output", "adaptive"))

    def using(self, group: str, name: str) -> "Workload":
        """Return the same workload with another output layer, core or input from `conf/`."""
        chosen = shipped(group, name)
        if group == "model":
            sizes = self.config.model
            chosen = replace(chosen, hidden_size=sizes.hidden_size, embedding_size=sizes.embedding_size)
        if hasattr(chosen, "cutoffs"):
            chosen = replace(chosen, cutoffs=self.cutoffs)
        return replace(self, config=replace(self.config, **{group: chosen}))

    def automatic_cutoffs(self) -> list[int]:
        """Return the cutoffs that a run of these sizes would use on this machine."""
        prepare_cpu(self.threads)
        sizes: dict[str, Any] = {"counts": self.counts, "width": self.width, "tokens": self.tokens}
        machine: dict[str, Any] = {"device": self.device, "precision": self.config.trainer.precision}
        adaptive = shipped("output", "adaptive")
        return choose_clusters(adaptive, **sizes, **machine, cache_dir=Path("data/cost-models")).cutoffs

    @property
    def tokens(self) -> int:
        return self.config.trainer.batch_size * self.config.trainer.bptt

    @property
    def width(self) -> int:
        return self.config.model.width

    def words(self, size: int) -> NDArray[np.int64]:
        """Words drawn in proportion to their counts; the same ones each time."""
        return np.random.default_rng(0).choice(len(self.counts), size=size, p=self.counts / self.counts.sum())

    def targets(self) -> Tensor:
        return torch.from_numpy(self.words(self.tokens))

    def streams(self) -> Streams:
        words, trainer = self.words(NUM_BATCHES * self.tokens).astype(np.uint32), self.config.trainer
        return Streams(words, batch_size=trainer.batch_size, bptt=trainer.bptt, eos_id=0)

    def __str__(self) -> str:
        model, trainer = self.config.model, self.config.trainer
        return (
            f"{len(self.counts):,} words, {self.config.output.name} {self.cutoffs}, {model.name} {model.hidden_size}, "
            f"embedding {model.embedding_size}, {trainer.batch_size} x {trainer.bptt} tokens, threads: {self.threads}"
        )


@cache
def shipped(group: str, name: str) -> Any:
    """Settings of `GROUP=NAME`."""
    return getattr(compose([f"{group}={name}"], name="train", schema=TrainConfig), group)


def make_layer(workload: Workload) -> OutputLayer:
    return build_output(workload.config.output, width=workload.width, counts=workload.counts)


def layer_step(name: str, workload: Workload) -> Step:
    """Forward and backward pass of a layer, or of torch's adaptive softmax."""
    torch.manual_seed(0)
    device, precision = workload.device, workload.config.trainer.precision
    hidden_ND = torch.randn(workload.tokens, workload.width, device=device, requires_grad=True)
    targets_N = workload.targets().to(device)
    if name == TORCH_ADAPTIVE:
        module: nn.Module = nn.AdaptiveLogSoftmaxWithLoss(workload.width, len(workload.counts), workload.cutoffs)
        loss: Callable[[], Tensor] = lambda: module(hidden_ND, targets_N).loss  # noqa: E731
    else:
        layer = module = make_layer(workload.using("output", name))
        # In training the prefetch thread makes the plan, so the plan's time is not part of the step.
        plan = layer.plan(workload.targets()).to(device)
        loss = partial(layer.loss, hidden_ND, targets_N, plan)
    module.to(device)

    def step() -> None:
        module.zero_grad(set_to_none=True)
        hidden_ND.grad = None
        with matmul_precision(precision):
            with autocast(precision, device):
                value = loss()
            value.backward()  # type: ignore[no-untyped-call]
        for table in module.modules():
            if isinstance(table, SparseTable):
                table.take_used()

    return step


def stack_step(name: str, workload: Workload) -> Step:
    """Make a training step by its name; TUNED may be followed by cutoffs.

    All but DEFAULT run with the CPU settings of `train.py`.
    """
    torch.manual_seed(0)
    if name == DEFAULT:
        torch.set_num_threads(workload.threads)
        return plain_step(workload, tuned=False)
    prepare_cpu(workload.threads)
    if name.startswith(TUNED):
        cutoffs = numbers(name.removeprefix(TUNED)) or workload.cutoffs
        return plain_step(replace(workload, cutoffs=cutoffs), tuned=True)
    if name == PEAK:
        dtype = torch.bfloat16 if workload.config.trainer.precision == "bf16" else torch.float32
        return large_matmul(dtype=dtype)
    trainer, steps = make_trainer(workload), cycle(range(NUM_BATCHES))
    make = trainer.batches().make  # in training the prefetch thread's work, which costs process time too
    return lambda: trainer.step(make(next(steps)))


def make_trainer(workload: Workload, ranks: Ranks | None = None) -> Trainer:
    """Build the trainer of a real run, without evaluations and checkpoints."""
    vocabulary = Vocabulary((UNK, EOS, *(f"word{i}" for i in range(2, len(workload.counts)))), workload.counts)
    model = build_model(workload.config, vocabulary).to(workload.device)
    return Trainer(model, streams=workload.streams(), config=workload.config, ranks=ranks)


def step_on_device(trainer: Trainer) -> Step:
    """Make a step on batches that are already on the device."""
    make = trainer.batches().make
    batches = cycle([to_device(make(step), trainer.device) for step in range(NUM_BATCHES)])
    return lambda: trainer.step(next(batches))


class PlainModel(nn.Module):
    """nn.Embedding, nn.LSTM or another core, and torch's adaptive softmax or a linear map with cross_entropy."""

    def __init__(self, workload: Workload, *, sparse: bool) -> None:
        super().__init__()
        config, num_words = workload.config.model, len(workload.counts)
        self.embedding = nn.Embedding(num_words, config.embedding_size, sparse=sparse)
        self.core = TORCH_CORES[config.name](config.embedding_size, config.hidden_size)
        self.output: nn.Module = nn.Linear(config.hidden_size, num_words, bias=False)
        if workload.config.output.name == "adaptive":
            self.output = nn.AdaptiveLogSoftmaxWithLoss(config.hidden_size, num_words, workload.cutoffs)

    def forward(self, inputs_TB: Tensor, targets_TB: Tensor, state: State) -> tuple[Tensor, State]:
        hidden_TBD, state = self.core(self.embedding(inputs_TB), state)
        hidden_ND, targets_N = hidden_TBD.flatten(0, 1), targets_TB.flatten()
        if isinstance(self.output, nn.Linear):
            return F.cross_entropy(self.output(hidden_ND), targets_N), state
        if hidden_ND.is_cuda:  # there log_softmax is float32, which the module copies into the input's dtype
            hidden_ND = hidden_ND.float()
        return self.output(hidden_ND, targets_N).loss, state


def plain_step(workload: Workload, *, tuned: bool) -> Step:
    """Make the usual training step: clip by the global norm, torch's Adagrad, autocast for bfloat16.

    `tuned`: fused Adagrad, and sparse gradients for the embedding, without decay, which torch cannot combine.
    """
    device, settings = workload.device, workload.config.optim
    model = PlainModel(workload, sparse=tuned).to(device)
    assert isinstance(settings, AdagradConfig)
    start: dict[str, Any] = {"initial_accumulator_value": settings.accumulator_start, "eps": EPSILON}
    table, *others = model.parameters()
    decayed = others if tuned else [table, *others]
    decay = settings.weight_decay
    optimizers = [torch.optim.Adagrad(decayed, settings.lr, weight_decay=decay, fused=tuned or None, **start)]
    optimizers += [torch.optim.Adagrad([table], settings.lr, **start)] if tuned else []
    precision, streams = workload.config.trainer.precision, workload.streams()
    read = [[torch.from_numpy(words).to(device) for words in streams.read(step)] for step in range(NUM_BATCHES)]
    batches = cycle(read)
    state: State = None

    def step() -> None:
        nonlocal state
        inputs_TB, targets_TB = next(batches)
        with autocast(precision, device):
            loss, new_state = model(inputs_TB, targets_TB, state)
        (loss * len(inputs_TB)).backward()  # summed over the steps, averaged over the streams
        assert table.grad is not None
        if tuned:
            table.grad = table.grad.coalesce()
        grads = [parameter.grad for parameter in others if parameter.grad is not None]
        grads.append(table.grad.values() if tuned else table.grad)
        factor = (settings.max_grad_norm or float("inf")) / (nn.utils.get_total_norm(grads) + 1e-6)
        for grad in grads:
            grad.mul_(factor.clamp(max=1))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state = detach(new_state)

    return step


def layer_flops(workload: Workload) -> int:
    """Floating-point operations of the output layer's matmuls, forward and backward."""
    layer, meta = make_layer(workload), torch.device("meta")
    plan = layer.plan(workload.targets())
    hidden_ND = torch.empty(workload.tokens, workload.width, device=meta, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        loss = layer.to(meta).loss(hidden_ND, workload.targets().to(meta), plan.to(meta))
        loss.backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())


def step_flops(workload: Workload) -> int:
    """Floating-point operations of the output layer's and the LSTM's matmuls in a training step."""
    model = workload.config.model
    lstm_weights = 4 * model.hidden_size * (model.embedding_size + model.hidden_size)
    # Forward, and backward for the inputs and for the weights.
    return layer_flops(workload) + 3 * 2 * workload.tokens * lstm_weights


def large_matmul(size: int = PEAK_SIZE, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> Step:
    """One square matmul, large enough to reach the peak speed."""
    a, b, out = torch.randn(3, size, size, device=device, dtype=dtype)
    return lambda: torch.mm(a, b, out=out)
