"""A trainer without the files of a run, for tests of single steps."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lm.benchmark.stacks import bare_trainer
from lm.building import build_model, training_streams, word_classes
from lm.config import Config
from lm.data.batches import Batch, BatchLoader
from lm.data.corpus import Corpus
from lm.ranks import Ranks
from lm.trainer import Trainer

LAYERS = [
    "output=full",
    "output=sampled",
    "output=hsm_freq",
    "output=adaptive output.cutoffs=[10,20]",
    "output=dsoftmax output.cutoffs=[10,20]",
    "output=dsoftmax_star output.cutoffs=[10,20]",
]


def make_trainer(
    config: Config, corpus: Corpus, *, device: str = "cpu", num_batches: int = 6, ranks: Ranks | None = None
) -> tuple[Trainer, list[Batch]]:
    """A trainer with its first batches."""
    classes = word_classes(config, corpus, notice=lambda _: None)
    model = build_model(config, corpus.vocabulary, classes=classes).to(device)
    streams = training_streams(config, corpus)
    trainer = bare_trainer(model, config=config, streams=streams, ranks=ranks)
    settings = {"seed": config.seed, "accumulate": config.trainer.accumulate, "columns": trainer.columns}
    loader = BatchLoader(streams, model.output, start=0, pin=False, **settings)  # type: ignore[arg-type]
    return trainer, [loader.make(step).to(torch.device(device)) for step in range(num_batches)]


@contextmanager
def no_waiting_for_the_gpu() -> Iterator[None]:
    """Whatever asks the device for a number inside is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def losses_of(trainer: Trainer, batches: list[Batch]) -> list[float]:
    """Train on the batches; the loss of each."""
    losses = []
    for batch in batches:
        before = trainer.loss_sum.item()
        trainer.train_step(batch)
        losses.append((trainer.loss_sum.item() - before) / (batch.num_tokens * trainer.ranks.size))
    return losses
