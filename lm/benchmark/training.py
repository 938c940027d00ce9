"""`what=training`: how close real training comes to the speed of its bare steps.

    python -m lm.benchmark what=training experiment=text8 trainer.threads=2

Takes every setting of `train.py`. Each of `rounds` rounds runs `steps` steps of the trainer's own loop, with prefetch
thread, metrics and progress, then as many bare steps on batches made in advance. The best round of each counts. Wall
clock shows the speed; process time shows the added work, also on a shared machine.
"""

import contextlib
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from lm.benchmark.arguments import HELP, fill, keys_of
from lm.benchmark.measure import Seconds, row, timed, write_rows
from lm.cli import compose_config as compose
from lm.config.schema import TrainConfig
from lm.data.opening import open_corpus
from lm.output.clusters.settings import ClusteredConfig
from lm.output.generated import compile_loss
from lm.runs.assembly import automatic_clusters, build_model, pick_threads, training_streams, word_classes
from lm.system.arithmetic import exact_products
from lm.system.console import say
from lm.system.devices import pick_device
from lm.system.interrupt import Stopped, StopRequest
from lm.system.processor import prepare_processor
from lm.training.metrics import Metrics
from lm.training.trainer import Trainer

ENDLESS = 1 << 40
"""More epochs than any measurement reaches."""


@dataclass
class TrainingSettings:
    """Keys of `what=training`, besides those of `train.py`."""

    steps: int = 30
    """Steps per round."""
    rounds: int = 5
    out: str = "benchmark.json"


class StopAt(StopRequest):
    """Stops a trainer at a given step."""

    step: int
    trainer: Trainer

    def pending(self) -> int:
        return 1 if self.trainer.progress.step >= self.step else 0


def main(pairs: dict[str, str]) -> None:
    own = keys_of(TrainingSettings) | {HELP}
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
    real, bare = (
        Seconds(*(min(seconds) / settings.steps for seconds in zip(*kind, strict=True)))
        for kind in zip(*rounds[1:], strict=True)
    )
    tokens = config.trainer.batch_size * config.trainer.bptt
    say(
        f"real training {1e3 * real.wall:.1f} ms per step ({tokens / real.wall:,.0f} tokens/s), bare steps "
        f"{1e3 * bare.wall:.1f} ms ({tokens / bare.wall:,.0f} tokens/s): {bare.wall / real.wall:.1%} of their speed, "
        f"{bare.process / real.process:.1%} by process time; best of {settings.rounds} rounds of {settings.steps} steps"
    )
    base = "training/share_of_the_step_rate"
    rows = [row(base, 1e3 * real.wall, "ms", bare.wall / real.wall)]
    rows += [row(f"{base}/process_time", 1e3 * real.process, "ms", bare.process / real.process)]
    write_rows(rows, settings.out)


def make_trainer(config: TrainConfig, folder: Path) -> tuple[Trainer, StopAt]:
    """A trainer on the run's real corpus, which stops where `StopAt` says and saves nothing."""
    device = pick_device(config.trainer.device, key="trainer.device")
    exact_products()
    prepare_processor(pick_threads(config))
    corpus = open_corpus(config.data, notice=say)
    if isinstance(config.output, ClusteredConfig) and config.output.cutoffs == "auto":
        choice = automatic_clusters(config, corpus, device=device, notice=say)
        config = replace(config, output=replace(config.output, cutoffs=choice.cutoffs))
    classes = word_classes(config, corpus, notice=say)
    model = build_model(config, corpus.vocabulary, classes=classes).to(device)
    if config.trainer.compile:
        compile_loss(model.output, device=device, notice=say)
    stop, metrics = StopAt(), Metrics(folder, settings={})
    streams = training_streams(config, corpus)
    stop.trainer = Trainer(model, streams=streams, config=config, metrics=metrics, stop=stop)
    return stop.trainer, stop


def measure(trainer: Trainer, stop: StopAt, *, steps: int) -> tuple[Seconds, Seconds]:
    """Real training for `steps` steps, then the next `steps` bare steps."""

    def train() -> None:
        with contextlib.suppress(Stopped):
            trainer.run()

    def take_steps() -> None:
        for batch in batches:
            trainer.train_step(batch.to(trainer.device))
        trainer.train_clock.synchronise()

    stop.step, before = trainer.progress.step + steps, trainer.train_clock.seconds
    # By the trainer's own clock, which leaves out what surrounds the loop.
    real = timed(train)._replace(wall=trainer.train_clock.seconds - before)
    first, make = trainer.progress.step, trainer.loader().make
    batches = [make(step) for step in range(first, first + steps)]
    return real, timed(take_steps)
