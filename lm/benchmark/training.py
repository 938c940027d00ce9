"""`what=training`: how much of the bare step's speed is left in real training, with loader, logging and progress.

    python -m lm.benchmark what=training experiment=text8 trainer.threads=2

Takes every setting of `train.py`. In turn, `rounds` times: so many steps by the trainer's own loop, reading the corpus
by its thread, writing metrics to a folder that is thrown away, drawing progress; and the same steps on batches made
beforehand. Both by the wall clock; the best round of each counts, because others on the machine can only slow it down.
The same in process time says how much work is added, also where the machine is too busy for wall clocks.
"""

import contextlib
import tempfile
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path

from lm.benchmark.arguments import fill
from lm.benchmark.rows import write_rows
from lm.benchmark.stacks import batch_maker
from lm.config.command_line import compose
from lm.config.commands import TrainConfig
from lm.data.opening import open_corpus
from lm.optim.optimizer import build_optimizer
from lm.output.clusters.settings import ClusteredConfig
from lm.output.generated import compile_loss
from lm.runs.assembly import automatic_clusters, build_model, pick_threads, training_streams, word_classes
from lm.system.arithmetic import exact_products
from lm.system.console import say
from lm.system.devices import pick_device
from lm.system.interrupt import Stopped, StopRequest
from lm.system.processor import prepare_processor
from lm.training.metrics import Metrics
from lm.training.trainer import Trainer, TrainingProgress

ENDLESS = 1 << 40
"""Epochs that no measurement comes to the end of."""


@dataclass
class TrainingSettings:
    """Keys of `what=training`, besides those of `train.py`."""

    steps: int = 30
    """Steps of a round."""
    rounds: int = 5
    out: str = "benchmark.json"


class StopAt(StopRequest):
    """Asks a trainer to stop at a step."""

    step: int
    trainer: Trainer

    def pending(self) -> int:
        return 1 if self.trainer.progress.step >= self.step else 0


def run_training(pairs: dict[str, str]) -> None:
    """Measure, print, write."""
    own = [field.name for field in fields(TrainingSettings)]
    settings = fill(TrainingSettings, {key: value for key, value in pairs.items() if key in own})
    arguments = [f"{key}={value}" for key, value in pairs.items() if key not in own]
    config = compose(arguments, name="train", schema=TrainConfig)
    endless = replace(config.trainer, max_epochs=ENDLESS, max_steps=None, max_tokens=None, max_seconds=None)
    config = replace(config, trainer=endless)
    with tempfile.TemporaryDirectory() as folder:
        trainer, stop = make_trainer(config, Path(folder))
        rounds = [measure(trainer, stop, steps=settings.steps) for _ in range(settings.rounds + 1)]
        if trainer.metrics is not None:
            trainer.metrics.close()
    real, bare, real_cpu, bare_cpu = (min(seconds) / settings.steps for seconds in zip(*rounds[1:], strict=True))
    tokens = config.trainer.batch_size * config.trainer.bptt
    say(
        f"real training {1e3 * real:.1f} ms a step ({tokens / real:,.0f} tokens/s), bare steps {1e3 * bare:.1f} ms "
        f"({tokens / bare:,.0f} tokens/s): {bare / real:.1%} of their speed, or {bare_cpu / real_cpu:.1%} by process "
        f"time; best of {settings.rounds} rounds of {settings.steps} steps"
    )
    base = "training/share_of_the_step_rate"
    rows = [
        {"name": base, "value": 1e3 * real, "unit": "ms", "ratio": bare / real},
        {"name": f"{base}/process_time", "value": 1e3 * real_cpu, "unit": "ms", "ratio": bare_cpu / real_cpu},
    ]
    write_rows(rows, settings.out)


def make_trainer(config: TrainConfig, folder: Path) -> tuple[Trainer, StopAt]:
    """A run's trainer on its real corpus, which stops where it is told and saves nothing."""
    device = pick_device(config.trainer.device, key="trainer.device")
    exact_products()
    prepare_processor(pick_threads(config))
    corpus = open_corpus(config.data, notice=say)
    if isinstance(config.output, ClusteredConfig) and config.output.cutoffs == "auto":
        choice = automatic_clusters(config, corpus, device=device, notice=say)
        config = replace(config, output=replace(config.output, cutoffs=choice.cutoffs))
    classes = word_classes(config, corpus, notice=say)
    model = build_model(config, corpus.vocabulary, classes=classes).to(device).train()
    if config.trainer.compile:
        compile_loss(model.output, device=device, notice=say)
    stop = StopAt()
    stop.trainer = Trainer(
        model,
        optimizer=build_optimizer(model, config.optim),
        streams=training_streams(config, corpus),
        config=config,
        progress=TrainingProgress(),
        metrics=Metrics(folder, texts={}, settings={}),
        evaluate=None,
        save=lambda _trainer, _best: None,
        stop=stop,
    )
    return stop.trainer, stop


def measure(trainer: Trainer, stop: StopAt, *, steps: int) -> tuple[float, float, float, float]:
    """Seconds of so many steps of real training and of as many bare ones on the batches that come next.

    First both by the wall clock, then both in process time.
    """
    stop.step = trainer.progress.step + steps
    before, start_cpu = trainer.train_clock.seconds, time.process_time()
    with contextlib.suppress(Stopped):
        trainer.run()
    real, real_cpu = trainer.train_clock.seconds - before, time.process_time() - start_cpu
    next_step, make = trainer.progress.step, batch_maker(trainer)
    batches = [make(step) for step in range(next_step, next_step + steps)]
    start, start_cpu = time.monotonic(), time.process_time()
    for batch in batches:
        trainer.train_step(batch.to(trainer.device))
    trainer.train_clock.synchronise()
    return real, time.monotonic() - start, real_cpu, time.process_time() - start_cpu
