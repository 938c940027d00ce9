"""What `what=step` compares: the trainer's own step, the same training as one would write it with torch, bare products.

Shapes: T steps, B streams, N = T B tokens, D width of the hidden state, V words.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from lm.benchmark import candidates
from lm.benchmark.counts import draw_words
from lm.benchmark.measure import Step
from lm.config.commands import TrainConfig
from lm.config.registry import find_plugin
from lm.data.batches import Batch, BatchLoader, Streams
from lm.model.dropout import DropoutMasks
from lm.model.inputs.table import TableInput
from lm.model.language_model import LanguageModel
from lm.model.state import detach
from lm.optim.optimizer import build_optimizer
from lm.optim.optimizers.adagrad import ACCUMULATOR_START, EPSILON, AdagradConfig
from lm.optim.sparse_table import SparseTable
from lm.system.interrupt import StopRequest
from lm.system.processor import prepare_processor
from lm.system.ranks import Ranks
from lm.training.trainer import Trainer, TrainingProgress

NUM_BATCHES = 8
"""Different batches that the steps go round."""
OURS, NAIVE, NAIVE_FUSED, PRODUCTS = "ours", "naive", "naive, fused", "products"


State = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class StepWorkload:
    """Sizes, settings and text that every stack gets."""

    counts: NDArray[np.int64]
    cutoffs: list[int]
    output: str
    config: TrainConfig
    threads: int

    @property
    def tokens(self) -> int:
        return self.config.trainer.batch_size * self.config.trainer.bptt

    def streams(self) -> Streams:
        """Text whose words are drawn by their counts."""
        return drawn_streams(self.config, self.counts, num_batches=NUM_BATCHES)

    def layer_workload(self) -> candidates.Workload:
        return candidates.Workload(self.counts, self.cutoffs, self.config.model.hidden_size, self.tokens)


def prepare(name: str, workload: StepWorkload) -> tuple[Step, Step]:
    """(a warm-up, one training step) of the stack of that name; they are the same, the next one on the next batch.

    Called in a process of its own, which is set up as `train.py` sets itself up, or not at all.
    """
    torch.manual_seed(0)
    if name in (OURS, PRODUCTS):
        prepare_processor(workload.threads)
        step = our_step(workload) if name == OURS else bare_products(workload)
    else:
        torch.set_num_threads(workload.threads)
        step = naive_step(workload, fused=name == NAIVE_FUSED)
    return step, step


# ---- ours ----------------------------------------------------------------------------------------------------------


def drawn_streams(config: TrainConfig, counts: NDArray[np.int64], *, num_batches: int) -> Streams:
    """Text of so many batches whose words are drawn by their counts."""
    batch_size, bptt = config.trainer.batch_size, config.trainer.bptt
    words = draw_words(counts, num_batches * batch_size * bptt).astype(np.uint32)
    return Streams(words, batch_size=batch_size, bptt=bptt, eos_id=0)


def bare_trainer(model: LanguageModel, *, config: TrainConfig, streams: Streams, ranks: Ranks | None = None) -> Trainer:
    """The trainer of a real run, without its files, evaluations and limits."""
    return Trainer(
        model.train(),
        optimizer=build_optimizer(model, config.optim, ranks=ranks),
        streams=streams,
        config=config,
        progress=TrainingProgress(),
        metrics=None,
        evaluate=None,
        save=lambda _trainer, _best: None,
        stop=StopRequest(),
        ranks=ranks,
    )


def make_trainer(workload: StepWorkload) -> Trainer:
    config = workload.config
    model = LanguageModel(
        TableInput(len(workload.counts), config.model.embedding_size),
        find_plugin("model", config.model.name).target.build(config.model),
        candidates.make_layer(workload.output, workload.layer_workload()),
    )
    return bare_trainer(model, config=config, streams=workload.streams())


def batch_maker(trainer: Trainer) -> Callable[[int], Batch]:
    """Makes the batch of a step, as the prefetch thread would."""
    return BatchLoader(
        trainer.streams,
        trainer.model.output.plans,
        seed=trainer.config.seed,
        start=0,
        pin=False,
        micro_batches=trainer.config.trainer.micro_batches,
    ).make


def our_step(workload: StepWorkload) -> Step:
    """With the work of the prefetch thread, which takes process time like any other."""
    trainer = make_trainer(workload)
    make = batch_maker(trainer)
    turn = count()
    return lambda: trainer.train_step(make(next(turn) % NUM_BATCHES))


class Parts:
    """The trainer's step cut where its parts meet, each timed by itself; the loader's share is that of its thread."""

    def __init__(self, workload: StepWorkload) -> None:
        self.trainer = make_trainer(workload)
        self.make = batch_maker(self.trainer)
        self.rounds: list[dict[str, float]] = []

    def __call__(self) -> None:
        seconds: dict[str, float] = {}
        before = time.process_time()
        for part in self._step(len(self.rounds)):
            now = time.process_time()
            seconds[part] = seconds.get(part, 0.0) + now - before
            before = now
        self.rounds.append(seconds)

    def medians(self) -> dict[str, float]:
        """Without the first round, which warms up."""
        return {part: float(np.median([r[part] for r in self.rounds[1:]])) for part in self.rounds[0]}

    def _step(self, number: int) -> Iterator[str]:
        trainer, model = self.trainer, self.trainer.model
        batch = self.make(number)
        yield "loader"
        embedded_TBE = model.input(batch.inputs_TB, batch.rows_U, batch.inverse_TB)
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
    """A word table and, because the optimizer wants one, a dense parameter that weighs nothing."""

    def __init__(self, num_words: int, width: int) -> None:
        super().__init__()
        self.input = SparseTable(num_words, width)
        nn.init.uniform_(self.input.weight, -0.1, 0.1)
        self.nothing = nn.Parameter(torch.zeros(1))


def embedding_step(workload: StepWorkload) -> Step:
    """All that a step does to the input table: read its rows, sum their gradients, clip, decay, Adagrad."""
    config = workload.config
    trainer = config.trainer
    model = OnlyEmbedding(len(workload.counts), config.model.embedding_size).train()
    optimizer = build_optimizer(model, config.optim)
    streams = workload.streams()
    batches = [torch.from_numpy(np.ascontiguousarray(streams.read(step)[0])) for step in range(NUM_BATCHES)]
    plans = [(words_TB, *torch.unique(words_TB, return_inverse=True)) for words_TB in batches]
    gradient_TBE = torch.randn(trainer.bptt, trainer.batch_size, config.model.embedding_size) / workload.tokens
    turn = count()

    def step() -> None:
        values_TBE = model.input(*plans[next(turn) % NUM_BATCHES])
        values_TBE.backward(gradient_TBE)
        optimizer.step(torch.zeros(()), lr=config.optim.lr, num_steps=trainer.bptt)

    return step


# ---- what one would write with torch alone -------------------------------------------------------------------------


class NaiveModel(nn.Module):
    """nn.Embedding, nn.LSTM, and torch's adaptive softmax or a linear map with cross_entropy."""

    def __init__(self, workload: StepWorkload) -> None:
        super().__init__()
        config, num_words = workload.config.model, len(workload.counts)
        self.embedding = nn.Embedding(num_words, config.embedding_size)
        self.lstm = nn.LSTM(config.embedding_size, config.hidden_size)
        self.adaptive = workload.output == "adaptive"
        self.output = (
            nn.AdaptiveLogSoftmaxWithLoss(config.hidden_size, num_words, workload.cutoffs)
            if self.adaptive
            else nn.Linear(config.hidden_size, num_words, bias=False)
        )

    def forward(self, inputs_TB: Tensor, targets_TB: Tensor, state: State | None) -> tuple[Tensor, State]:
        hidden_TBD, state = self.lstm(self.embedding(inputs_TB), state)
        hidden_ND, targets_N = hidden_TBD.flatten(0, 1), targets_TB.flatten()
        if self.adaptive:
            return self.output(hidden_ND, targets_N).loss, state
        return F.cross_entropy(self.output(hidden_ND), targets_N), state


def naive_step(workload: StepWorkload, *, fused: bool) -> Step:
    """The training step of any tutorial: dense gradients, clip_grad_norm_, torch's Adagrad."""
    model = NaiveModel(workload)
    settings = workload.config.optim
    assert isinstance(settings, AdagradConfig)
    optimizer = torch.optim.Adagrad(
        model.parameters(),
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        initial_accumulator_value=ACCUMULATOR_START,
        eps=EPSILON,
        **({"fused": True} if fused else {}),
    )
    streams = workload.streams()
    batches = [tuple(torch.from_numpy(words) for words in streams.read(step)) for step in range(NUM_BATCHES)]
    turn = count()
    state: State | None = None

    def step() -> None:
        nonlocal state
        inputs_TB, targets_TB = batches[next(turn) % NUM_BATCHES]
        loss, new_state = model(inputs_TB, targets_TB, state)
        (loss * len(inputs_TB)).backward()  # summed over the steps, averaged over the streams
        nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        state = (new_state[0].detach(), new_state[1].detach())

    return step


# ---- nothing but the matrix products -------------------------------------------------------------------------------


def bare_products(workload: StepWorkload) -> Step:
    """The matrix products of the step: the output layer's and the LSTM's, whose state passes one step at a time."""
    config = workload.config
    layer = candidates.bare_products(workload.output, workload.layer_workload())
    width, gates, streams = config.model.hidden_size, 4 * config.model.hidden_size, config.trainer.batch_size
    inputs = candidates.products_of([(workload.tokens, gates, config.model.embedding_size)])
    state_BD, weight_GD, gates_BG = torch.randn(streams, width), torch.randn(gates, width), torch.empty(streams, gates)
    states_ND, gates_NG = torch.randn(workload.tokens, width), torch.randn(workload.tokens, gates)
    grad_BD, grad_GD = torch.empty_like(state_BD), torch.empty_like(weight_GD)

    def step() -> None:
        layer()
        inputs()
        for _ in range(config.trainer.bptt):
            torch.mm(state_BD, weight_GD.t(), out=gates_BG)
            torch.mm(gates_BG, weight_GD, out=grad_BD)
        torch.mm(gates_NG.t(), states_ND, out=grad_GD)

    return step
