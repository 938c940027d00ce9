"""A training run from settings to summary, top to bottom.

`train` gathers the parts: corpus, clusters, model, trainer, run directory. `train_loop` trains. `finish` scores the
test split. The run directory is not touched before every part is built and a checkpoint, if there is one, is restored.
"""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

from lm.config.groups import find_plugin
from lm.config.schema import TrainConfig
from lm.data.corpus import Corpus, open_corpus
from lm.model.language_model import build_model
from lm.model.scoring import Score, score
from lm.output.clusters.choice import ClusterChoice
from lm.system import checkpoint
from lm.system.console import Progress, say
from lm.system.devices import check_precision, disable_tf32, pick_device, using_threads
from lm.system.errors import UserError
from lm.system.files import write_json
from lm.system.interrupt import Stopped, StopRequest
from lm.system.memory import explain_oom, reset_peak_memory, smaller_batch
from lm.system.ranks import Ranks
from lm.training import report
from lm.training.averaging import use_average
from lm.training.memory_check import MemoryCheck, dry_run
from lm.training.profiling import StepProfiler
from lm.training.restore import WarmStart
from lm.training.run_dir import RunDir, open_run_dir, resolve
from lm.training.run_writer import RunWriter
from lm.training.setup import (
    after_restart,
    check_ranks,
    resolve_cutoffs,
    restore_trainer,
    resumed_config,
    set_threads,
    training_streams,
)
from lm.training.trainer import Trainer

Evaluate = Callable[[str], Score]


def train(config: TrainConfig, overrides: list[str]) -> float | None:
    """Train until a limit, in one process or as one of several ranks; return the best validation perplexity.

    Saves and raises Stopped on Ctrl-C or SIGTERM. Returns None after a dry run.
    """
    ranks = Ranks.from_environment()
    with ranks.joined(pick_device(config.trainer.device, key="trainer.device", ranks=ranks)), ExitStack() as stack:
        check_ranks(config, ranks)
        config = after_restart(config)
        start = ranks.from_rank0(lambda: resolve(config))  # new or resumed
        saved: dict[str, Any] | None = None
        clusters: ClusterChoice | None = None
        if start.checkpoint is not None:
            saved = checkpoint.load(start.checkpoint, trained=True, verify=config.verify)
            config, clusters = resumed_config(config, saved, file=start.checkpoint, overrides=overrides)
        device = pick_device(config.trainer.device, key="trainer.device", ranks=ranks)  # a resumed run may name another
        check_precision(config.trainer.precision, device)
        disable_tf32()
        evaluation_threads = stack.enter_context(set_threads(config, num_ranks=ranks.size))
        load = partial(open_corpus, config.data, verify=config.verify, trusted=start.is_trusted)
        corpus = ranks.rank0_first(load)
        corpus.verify()
        streams = training_streams(config, corpus)
        warm_start = WarmStart.open(config) if config.init is not None and saved is None else None
        if warm_start is not None:
            config = warm_start.with_clusters(config, vocab_size=len(corpus.vocabulary))
        memory = MemoryCheck(corpus.vocabulary, streams, device, num_ranks=ranks.size)
        memory.require_fit(config)
        stack.enter_context(memory.explain_oom(config))
        if saved is None:
            config, clusters = resolve_cutoffs(config, corpus, device=device, ranks=ranks)
        if config.trainer.dry_run:
            dry_run(config, corpus=corpus, streams=streams, device=device, clusters=clusters)
            return None
        layer = find_plugin("output", config.output.name).target
        classes = ranks.from_rank0(lambda: layer.word_classes(config.output, corpus))
        model = build_model(config, corpus.vocabulary, classes=classes)
        origin = warm_start.load_into(model, corpus.vocabulary) if warm_start is not None else None
        trainer = Trainer(model.to(device), streams=streams, config=config, ranks=ranks)
        if saved is not None:
            origin = restore_trainer(trainer, saved, corpus=corpus, start=start)
        # Nothing can be rejected from here on.
        stop = stack.enter_context(StopRequest(second_ends=ranks.size == 1))  # torchrun sends every signal twice
        run_dir = stack.enter_context(open_run_dir(start, config, overrides=overrides, device=device, ranks=ranks))
        position = int(saved["metrics_position"]) if saved is not None else 0
        writer = stack.enter_context(RunWriter(run_dir, trainer, corpus=corpus, clusters=clusters, position=position))
        profiler = StepProfiler(run_dir.path, device) if config.trainer.profile and ranks.is_rank0 else None
        evaluate = partial(score_split, trainer, corpus, stop=stop, threads=evaluation_threads)
        say(report.opening(trainer, corpus=corpus, run=str(run_dir.path), clusters=clusters, origin=origin))
        train_loop(trainer, evaluate, writer, stop, profiler=profiler)
        finish(trainer, evaluate, writer, corpus=corpus, clusters=clusters)
        return trainer.progress.best_perplexity


def train_loop(
    trainer: Trainer, evaluate: Evaluate, writer: RunWriter, stop: StopRequest, *, profiler: StepProfiler | None
) -> None:
    """Train until a limit is reached. Raises Stopped if a signal arrives."""
    trainer.model.train()
    reset_peak_memory(trainer.device)
    with (
        trainer.batches() as batches,
        Progress(trainer.planned_steps, start=trainer.progress.step, label="train", unit="steps") as bar,
        profiler or nullcontext(),
        trainer.train_clock.running(),
    ):
        for batch in batches:
            if trainer.evaluation_due():
                with trainer.train_clock.paused():
                    with trainer.evaluation_weights():
                        score = evaluate("valid")
                    is_best = trainer.record_evaluation(score)
                    writer.log_evaluation(score, is_best=is_best)
                    writer.save(best=is_best)  # metrics and the weights behind them stay together
            elif writer.due():
                with trainer.train_clock.paused():
                    writer.save()
            if trainer.finished:
                break
            trainer.step(batch)
            if profiler is not None:
                profiler.step()
            bar.advance()
            if trainer.log_due():
                bar.show(**writer.log_training(trainer.metrics()))
            if signal := trainer.agree(stop.signal):
                raise Stopped(128 + signal)
    writer.checkpoints.wait()


def score_split(trainer: Trainer, corpus: Corpus, split: str, *, threads: int, stop: StopRequest) -> Score:
    """Score a split, timed by the evaluation clock; raises Stopped after a signal."""
    config = trainer.config.evaluate
    text = corpus.text(split).first(config.max_tokens)
    advice = partial(smaller_batch, config.batch_size)
    with (
        trainer.eval_clock.running(),
        explain_oom(trainer.device, doing="evaluating", advice=advice),
        using_threads(threads),
    ):
        return score(
            trainer.model,
            text,
            corpus.vocabulary,
            streams=trainer.config.scoring_streams,
            batch_size=config.batch_size,
            label=split,
            stop=stop,
            ranks=trainer.ranks,
        )


def finish(
    trainer: Trainer, evaluate: Evaluate, writer: RunWriter, *, corpus: Corpus, clusters: ClusterChoice | None
) -> None:
    """Score the test split with the last and the best weights; write and print the summary."""
    with trainer.evaluation_weights():
        last = evaluate("test")
    writer.log({"test/loss": last.loss, "test/ppl": last.perplexity})
    best: Score | None = last
    if trainer.progress.best_step != trainer.progress.step:
        best = evaluate("test") if load_best(trainer, writer.run_dir) else None
    if writer.metrics is not None:
        summary = report.summary(trainer, corpus=corpus, last=last, best=best, clusters=clusters)
        write_json(writer.run_dir.path / "summary.json", summary)
        writer.metrics.finish()
        say(report.closing(trainer, corpus=corpus, last=last, best=best, run=writer.run_dir.path))


def load_best(trainer: Trainer, run_dir: RunDir) -> bool:
    """Load the weights of best.pt into the model; False, with a notice, if they are not those of the best step."""
    path, model = run_dir.best, trainer.model

    def load() -> None:
        content = checkpoint.load(path)
        with checkpoint.explain_damage(path):
            if content["progress"]["step"] != trainer.progress.best_step:
                raise UserError(f"{path} is not of step {trainer.progress.best_step}.")
            checkpoint.check_shapes(content["model"], model, path=path)
            model.load_state_dict(content["model"])
            use_average(model, content.get("average"))

    problem = None
    try:
        trainer.ranks.rank0_first(load)
    except UserError as error:
        problem = error
    if trainer.ranks.all_max(int(problem is not None)):
        say(f"The best weights cannot be scored: {problem or 'another rank could not load them.'}")
        return False
    return True
