"""The candidates of `what=step`: the trainer's own step, a plain PyTorch step of the same training, bare products.

Shapes: T steps, B streams, N = T B tokens, E width of the embedding, D of the hidden state, G = 4 D gates, V words.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from lm.benchmark import candidates
from lm.benchmark.arguments import draw_words
from lm.benchmark.measure import STEP, WARM_UP, Step, Work
from lm.config.schema import TrainConfig
from lm.data.batches import Streams
from lm.data.text.vocabulary import EOS, UNK, Vocabulary
from lm.model.dropout import DropoutMasks
from lm.model.state import State, detach
from lm.optim.optimizer import build_optimizer
from lm.optim.optimizers.adagrad import EPSILON, AdagradConfig
from lm.optim.sparse_table import SparseTable
from lm.runs.assembly import build_model
from lm.system.processor import prepare_processor
from lm.system.ranks import Ranks
from lm.training.trainer import Trainer

NUM_BATCHES = 8
"""Different batches that the steps cycle through."""
OURS, NAIVE, NAIVE_FUSED, PRODUCTS, PEAK = "ours", "naive", "naive, fused", "products", "peak"
PEAK_SIZE = 2048
"""Rows and columns of the square product whose speed counts as the most that the threads can compute."""

PLAIN_CORES: dict[str, Callable[..., nn.Module]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn": nn.RNN,
    "irnn": partial(nn.RNN, nonlinearity="relu"),
}
"""The cores that torch has too, in one layer without projection."""


@dataclass(frozen=True)
class StepWorkload:
    """Sizes, settings and text, the same for every stack."""

    counts: NDArray[np.int64]
    cutoffs: list[int]
    output: str
    config: TrainConfig
    threads: int

    @property
    def tokens(self) -> int:
        return self.config.trainer.batch_size * self.config.trainer.bptt

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Words with these counts; they are spelt by their numbers."""
        return Vocabulary((UNK, EOS, *(f"word{number}" for number in range(2, len(self.counts)))), self.counts)

    def streams(self) -> Streams:
        """Text of a few batches whose words are drawn in proportion to their counts."""
        words, trainer = draw_words(self.counts, NUM_BATCHES * self.tokens).astype(np.uint32), self.config.trainer
        return Streams(words, batch_size=trainer.batch_size, bptt=trainer.bptt, eos_id=0)

    def of_layer(self, device: torch.device = candidates.CPU) -> candidates.Workload:
        """What the output layer has to do."""
        sizes = candidates.Workload(self.counts, self.cutoffs, self.config.model.width, self.tokens)
        return replace(sizes, device=device, precision=self.config.trainer.precision)

    def __str__(self) -> str:
        model, trainer = self.config.model, self.config.trainer
        cutoffs = f" {self.cutoffs}" if hasattr(candidates.shipped_settings(self.output), "cutoffs") else ""
        return (
            f"{len(self.counts):,} words, {self.output}{cutoffs}, {model.name} {model.hidden_size}, embedding "
            f"{model.embedding_size}, {trainer.batch_size} x {trainer.bptt} tokens, threads {self.threads}"
        )


def prepare(name: str, workload: StepWorkload) -> Work:
    """A training step of the stack of that name; the next call takes the next batch.

    Runs in its own process. Ours is set up as `train.py` sets itself up, the naive ones as torch is by default.
    """
    torch.manual_seed(0)
    if name in (OURS, PRODUCTS, PEAK):
        prepare_processor(workload.threads)
        makers: dict[str, Callable[[StepWorkload], Step]] = {
            OURS: our_step,
            PRODUCTS: lambda w: bare_products(w).replay(),
            PEAK: lambda _: large_product(),
        }
        step = makers[name](workload)
    else:
        torch.set_num_threads(workload.threads)
        step = naive_step(workload, fused=name == NAIVE_FUSED)
    return {WARM_UP: step, STEP: step}


# ---- ours ----------------------------------------------------------------------------------------------------------


def make_trainer(workload: StepWorkload, device: torch.device = candidates.CPU, ranks: Ranks | None = None) -> Trainer:
    """The trainer of a real run, without evaluations and checkpoints."""
    output = candidates.layer_settings(workload.output, workload.of_layer())
    config = replace(workload.config, output=output)
    model = build_model(config, workload.vocabulary).to(device)
    return Trainer(model, streams=workload.streams(), config=config, ranks=ranks)


def stepper(trainer: Trainer) -> Step:
    """A step on a batch that was made before; the next call takes the next one."""
    make = trainer.loader().make
    batches = cycle([make(number).to(trainer.device) for number in range(NUM_BATCHES)])
    return lambda: trainer.train_step(next(batches))


def our_step(workload: StepWorkload) -> Step:
    """Includes the work of the prefetch thread, because it takes process time too."""
    trainer = make_trainer(workload)
    make, numbers = trainer.loader().make, cycle(range(NUM_BATCHES))
    return lambda: trainer.train_step(make(next(numbers)))


class Parts:
    """The trainer's step in parts, each timed separately: process time, or wall-clock time of several threads."""

    def __init__(self, workload: StepWorkload) -> None:
        self.clock = time.process_time if workload.threads == 1 else time.monotonic
        self.trainer = make_trainer(workload)
        self.make = self.trainer.loader().make
        self.rounds: list[dict[str, float]] = []

    def __call__(self) -> None:
        seconds: dict[str, float] = {}
        before = self.clock()
        for part in self._step(len(self.rounds)):
            now = self.clock()
            seconds[part] = seconds.get(part, 0.0) + now - before
            before = now
        self.rounds.append(seconds)

    def seconds(self) -> dict[str, float]:
        """The median process time or the best wall-clock time, without the first round, which warms up."""
        summarise = np.median if self.clock is time.process_time else np.min
        return {part: float(summarise([r[part] for r in self.rounds[1:]])) for part in self.rounds[0]}

    def _step(self, number: int) -> Iterator[str]:
        trainer, model = self.trainer, self.trainer.model
        batch = self.make(number)
        yield "loader"
        embedded_TBE = model.input(batch.inputs_TB, batch.distinct)
        yield "embedding"
        masks = DropoutMasks.of_batch(trainer.config.seed, number, trainer.config.trainer.batch_size)
        hidden_TBD, state = model.core(embedded_TBE, trainer.state, masks)
        yield "LSTM"
        cut_TBD = hidden_TBD.detach().requires_grad_()
        loss = model.output.loss(cut_TBD, batch.targets_TB, batch.plan)
        loss.backward(trainer.forward_backward.unit)  # type: ignore[no-untyped-call]
        yield "output"
        hidden_TBD.backward(cut_TBD.grad)
        trainer.state = detach(state)
        yield "LSTM"
        trainer.optimizer.step(loss.detach(), lr=trainer.learning_rate, num_steps=len(batch.targets_TB))
        yield "clip and optimizer"


class OnlyEmbedding(nn.Module):
    """A word table, and an empty dense parameter because the optimizer needs one."""

    def __init__(self, num_words: int, width: int) -> None:
        super().__init__()
        self.input = SparseTable(num_words, width)
        nn.init.uniform_(self.input.weight, -0.1, 0.1)
        self.nothing = nn.Parameter(torch.zeros(1))


def embedding_step(workload: StepWorkload) -> Step:
    """Everything a step does to the input table: read rows, sum their gradients, clip, decay, Adagrad."""
    config = workload.config
    model = OnlyEmbedding(len(workload.counts), config.model.embedding_size).train()
    optimizer = build_optimizer(model, config.optim)
    streams = workload.streams()
    batches = [torch.from_numpy(np.ascontiguousarray(streams.read(step)[0])) for step in range(NUM_BATCHES)]
    plans = cycle([(words_TB, *torch.unique(words_TB, return_inverse=True)) for words_TB in batches])
    gradient_TBE = torch.randn(*batches[0].shape, config.model.embedding_size) / workload.tokens

    def step() -> None:
        model.input(*next(plans)).backward(gradient_TBE)
        optimizer.step(torch.zeros(()), lr=config.optim.lr, num_steps=config.trainer.bptt)

    return step


# ---- plain PyTorch -------------------------------------------------------------------------------------------------


class NaiveModel(nn.Module):
    """nn.Embedding, nn.LSTM or another core, and torch's adaptive softmax or a linear map with cross_entropy."""

    def __init__(self, workload: StepWorkload) -> None:
        super().__init__()
        config, num_words = workload.config.model, len(workload.counts)
        self.embedding = nn.Embedding(num_words, config.embedding_size)
        self.core = PLAIN_CORES[config.name](config.embedding_size, config.hidden_size)
        self.adaptive = workload.output == "adaptive"
        self.output = (
            nn.AdaptiveLogSoftmaxWithLoss(config.hidden_size, num_words, workload.cutoffs)
            if self.adaptive
            else nn.Linear(config.hidden_size, num_words, bias=False)
        )

    def forward(self, inputs_TB: Tensor, targets_TB: Tensor, state: State) -> tuple[Tensor, State]:
        hidden_TBD, state = self.core(self.embedding(inputs_TB), state)
        hidden_ND, targets_N = hidden_TBD.flatten(0, 1), targets_TB.flatten()
        if self.adaptive:
            return self.output(hidden_ND, targets_N).loss, state
        return F.cross_entropy(self.output(hidden_ND), targets_N), state


def naive_step(workload: StepWorkload, *, fused: bool) -> Step:
    """The usual training step: dense gradients, clip_grad_norm_, torch's Adagrad."""
    model, settings = NaiveModel(workload), workload.config.optim
    assert isinstance(settings, AdagradConfig)
    optimizer = torch.optim.Adagrad(
        model.parameters(),
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        initial_accumulator_value=settings.accumulator_start,
        eps=EPSILON,
        **({"fused": True} if fused else {}),
    )
    streams = workload.streams()
    batches = cycle([tuple(torch.from_numpy(words) for words in streams.read(step)) for step in range(NUM_BATCHES)])
    state: State = None

    def step() -> None:
        nonlocal state
        inputs_TB, targets_TB = next(batches)
        loss, new_state = model(inputs_TB, targets_TB, state)
        (loss * len(inputs_TB)).backward()  # summed over the steps, averaged over the streams
        nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        state = detach(new_state)

    return step


# ---- bare matrix products ------------------------------------------------------------------------------------------


def bare_products(workload: StepWorkload) -> candidates.Products:
    """The products of the output layer and of the LSTM, whose state advances one time step at a time."""
    config, tokens, streams = workload.config, workload.tokens, workload.config.trainer.batch_size
    embedding, width = config.model.embedding_size, config.model.hidden_size

    def meta(*shape: int, **options: Any) -> Tensor:
        return torch.empty(shape, device="meta", **options)

    weight_GD = meta(4 * width, width)
    products = candidates.bare_products(workload.output, workload.of_layer())
    with products:
        gates_NG = F.linear(meta(tokens, embedding, requires_grad=True), meta(4 * width, embedding, requires_grad=True))
        gates_NG.backward(meta(tokens, 4 * width))  # type: ignore[no-untyped-call]
        for _ in range(config.trainer.bptt):
            torch.mm(meta(streams, width), weight_GD.t())
            torch.mm(meta(streams, 4 * width), weight_GD)
        torch.mm(meta(tokens, 4 * width).t(), meta(tokens, width))
    return products


def large_product(
    size: int = PEAK_SIZE, *, device: torch.device = candidates.CPU, dtype: torch.dtype = torch.float32
) -> Step:
    """One product, large enough to be as fast as any."""
    a, b, out = torch.randn(3, size, size, device=device, dtype=dtype)
    return lambda: torch.mm(a, b, out=out)
