"""One training run, from settings to summary: gather the parts, train or continue, report."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lm.config.schema import TrainConfig
from lm.config.validate import flatten, plain_values
from lm.data.batches import Streams
from lm.data.corpus import SPLITS, Corpus
from lm.data.opening import open_corpus
from lm.model.build import build_model, word_classes
from lm.model.language_model import count_parameters
from lm.model.scoring import Score, score
from lm.output.clusters.choice import ClusterChoice
from lm.output.clusters.settings import ClusteredConfig
from lm.system import checkpoint
from lm.system.arithmetic import check_precision, exact_products
from lm.system.console import say
from lm.system.devices import pick_device
from lm.system.errors import UserError
from lm.system.interrupt import Stopped, StopRequest
from lm.system.memory import explain_oom
from lm.system.processor import prepare_processor, using_threads
from lm.system.ranks import Ranks
from lm.training import report
from lm.training.assembly import automatic_clusters, pick_threads, training_streams
from lm.training.averaging import use_average
from lm.training.checkpoint_writer import CheckpointWriter
from lm.training.dry_run import dry_run
from lm.training.memory_check import MemoryCheck, scoring_advice
from lm.training.metrics import Metrics, kept_records
from lm.training.next_steps import in_sweep
from lm.training.profiling import StepProfiler
from lm.training.progress import TrainingProgress
from lm.training.provenance import add_start
from lm.training.restore import pack_vocabulary
from lm.training.resume import continued
from lm.training.run_dir import RunDir, create, others_unfinished, resolve
from lm.training.trainer import Trainer
from lm.training.warm_start import WarmStart


def train(config: TrainConfig, *, overrides: list[str]) -> float | None:
    """Train to the limits, alone or as one of several ranks; on Ctrl-C or SIGTERM save and raise Stopped.

    The best validation perplexity is returned, for sweepers that minimise it; None after a dry run.
    """
    ranks = Ranks.from_environment()
    with ranks.joined(pick_device(config.trainer.device, key="trainer.device", ranks=ranks)):
        if ranks.size > 1 and config.trainer.dry_run:
            raise UserError("trainer.dry_run=true is for a single process; got torchrun. Try python train.py ...")
        if differing := ranks.differing(flatten(plain_values(config))):
            raise UserError(
                f"All ranks must be started with the same settings; these differ: {', '.join(differing)}. "
                "Give every node the same command"
            )
        if (begun := ranks.begun_before()) is not None:
            config = _begun_again(config, begun)
        return _train(config, ranks=ranks, overrides=overrides)


def _begun_again(config: TrainConfig, run: str) -> TrainConfig:
    """Ranks that are started again go on from the run's last state, not from the checkpoint they once began with."""
    if config.resume in (None, "auto"):
        return replace(config, run_dir=run, resume="auto")
    return replace(config, resume=run)


def _train(config: TrainConfig, *, ranks: Ranks, overrides: list[str]) -> float | None:
    path, file = ranks.broadcast_from_first(lambda: resolve(config))
    if config.resume == "auto" and file is None and not in_sweep():
        say("resume=auto: found no unfinished run with these settings; starting a new one.")
        if config.run_dir is None and (others := others_unfinished(config)):
            say("\n".join(["Unfinished runs of other settings:", *others]))
    content = choice = None
    with contextlib.ExitStack() as stack:
        if path is not None and file is not None:
            run_dir = _hold(lambda: RunDir(path), ranks=ranks, stack=stack)
            content = checkpoint.load(file, trained=True, verify=config.verify)  # under the lock: nobody replaces it
            with checkpoint.explain_damage(file):
                config = continued(config, content, overrides=overrides)
                choice = ClusterChoice.from_dict(content["clusters"]) if content.get("clusters") else None
        ranks.columns(config.trainer.batch_size, groups=config.trainer.micro_batches)  # raises if it does not divide
        device = pick_device(config.trainer.device, key="trainer.device", ranks=ranks)
        check_precision(config.trainer.precision, device)
        exact_products()
        cores = torch.get_num_threads()
        stack.enter_context(using_threads(cores))  # as many again for the next run of this process
        prepare_processor(pick_threads(config, num_ranks=ranks.size))
        trusted = content is None or config.resume == "auto"  # else the settings are the checkpoint's
        opened = partial(open_corpus, config.data, notice=say, verify=config.verify, trusted=trusted)
        corpus = ranks.first_then_others(opened)
        streams = training_streams(config, corpus)
        start = WarmStart.open(config) if config.init is not None and content is None else None
        config = start.with_clusters(config, vocab_size=len(corpus.vocabulary)) if start is not None else config
        memory = MemoryCheck(corpus.vocabulary, streams, device, num_ranks=ranks.size)
        memory.require_fit(config)
        stack.enter_context(memory.explain_oom(config))
        if isinstance(config.output, ClusteredConfig) and config.output.cutoffs == "auto":
            # For the whole batch, so that any number of ranks trains the same model.
            choice = ranks.broadcast_from_first(lambda: automatic_clusters(config, corpus, device=device, notice=say))
            config = replace(config, output=replace(config.output, cutoffs=choice.cutoffs))
        if config.trainer.dry_run:
            dry_run(config, corpus=corpus, streams=streams, device=device, choice=choice)
            return None
        if content is None:
            with torch.device("meta"):  # refuses what does not fit, before there is a directory
                model = build_model(config, corpus.vocabulary)
                if start is not None:
                    start.load_into(model, corpus.vocabulary)
            run_dir = _hold(lambda: create(config, path), ranks=ranks, stack=stack)
        run = Run(
            config,
            corpus=corpus,
            streams=streams,
            run_dir=run_dir,
            device=device,
            evaluation_threads=config.trainer.threads or cores,
            continued_from=(file, content) if file is not None and content is not None else None,
            choice=choice,
            ranks=ranks,
            warm_start=start,
        )
        with run_dir.record(overrides):
            run.execute()
        return run.trainer.progress.best_perplexity


def _hold(open_locked: Callable[[], RunDir], *, ranks: Ranks, stack: contextlib.ExitStack) -> RunDir:
    """A run directory that the first rank locks for all."""
    held: list[RunDir] = []

    def lock() -> Path:
        held.append(stack.enter_context(contextlib.closing(open_locked())))
        return held[0].path

    path = ranks.broadcast_from_first(lock)
    return held[0] if held else RunDir(path, lock=False)


class Run:
    """The parts of a run, put together."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        corpus: Corpus,
        streams: Streams,
        run_dir: RunDir,
        device: torch.device,
        evaluation_threads: int | None = None,
        continued_from: tuple[Path, dict[str, Any]] | None = None,
        choice: ClusterChoice | None = None,
        ranks: Ranks | None = None,
        warm_start: WarmStart | None = None,
    ) -> None:
        self.config, self.corpus, self.run_dir, self.choice = config, corpus, run_dir, choice
        self.evaluation_threads = evaluation_threads or torch.get_num_threads()
        self.ranks = ranks = ranks or Ranks()
        # torchrun passes a signal on to ranks that have it already, so that there a second one means nothing.
        self.stop = StopRequest(second_ends=ranks.size == 1)
        self.writer = CheckpointWriter()
        self.packed_vocabulary = pack_vocabulary(corpus.vocabulary)
        progress = self._progress_of(*continued_from) if continued_from is not None else TrainingProgress()
        classes = ranks.broadcast_from_first(lambda: word_classes(config, corpus, notice=say))
        self.model = build_model(config, corpus.vocabulary, classes=classes)
        self.began_with = warm_start.load_into(self.model, corpus.vocabulary) if warm_start is not None else None
        self.model.to(device)
        self.trainer = Trainer(
            self.model,
            streams=streams,
            config=config,
            progress=progress,
            evaluate=lambda: self.score("valid"),
            save=self.save,
            stop=self.stop,
            ranks=ranks,
            profiler=StepProfiler(run_dir.path, device) if config.trainer.profile and ranks.is_first else None,
        )
        position = self._continue_from(*continued_from) if continued_from is not None else 0
        # Only now, when nothing more can be refused, is anything in the directory changed.
        ranks.remember(run_dir.path)
        if ranks.is_first:
            run_dir.write_settings(plain_values(config))
            name, threads = report.device_name(device), torch.get_num_threads()
            add_start(run_dir.path, device=name, threads=threads, num_ranks=ranks.size)
            (run_dir.path / "summary.json").unlink(missing_ok=True)
            texts = {"clusters": choice.as_markdown()} if choice is not None else {}
            settings = flatten(plain_values(config))
            self.trainer.metrics = Metrics(run_dir.path, position=position, texts=texts, settings=settings)
        self.unigram = {split: corpus.unigram_perplexity(split) for split in ("valid", "test")}

    def _continue_from(self, file: Path, content: dict[str, Any]) -> int:
        """Take over the checkpoint's state, and make it the run's last; how much of the figures belongs to it."""
        own, last = self.trainer.state_dict(), self.run_dir.last
        with checkpoint.explain_damage(file):
            for key in ("optimizer", "average", "state", "loss_sum"):
                checkpoint.check_state(own[key], content.get(key), path=file, place=key)
            self.trainer.load_state_dict(content)
            position = int(content["metrics_position"])
        if self.ranks.is_first:
            kept_records(self.run_dir.path, position)  # or they are refused
        if file != last and self.ranks.is_first:
            checkpoint.share(file, last)
        return position

    def execute(self) -> None:
        """Train, score the test split, and say what came out."""
        path = self.run_dir.path
        options: dict[str, Any] = {"corpus": self.corpus, "choice": self.choice, "num_ranks": self.ranks.size}
        say(report.opening(self.config, self.model, run=str(path), **options))
        if self.began_with is not None:
            say(self.began_with)
        if self.trainer.progress.step:
            say(f"resumed  at step {self.trainer.progress.step:,}")
        try:
            with self.stop:
                self.trainer.run()
                self.writer.wait()
                self.finish()
        except Stopped:
            self.writer.wait()
            self.ranks.last_agreement()
            self.ranks.all_max(0)  # a launcher whose first rank has ended gives the one that writes little time
            step = self.trainer.progress.step
            say(f"Stopped and saved at step {step}. Go on with:\n  {report.resume_command(path)}")
            raise
        finally:
            self.writer.close()
            if self.trainer.metrics is not None:
                self.trainer.metrics.close()

    def finish(self) -> None:
        """Test perplexity of the last and of the best weights, the summary in the directory and on the screen."""
        trainer = self.trainer
        progress = trainer.progress
        with trainer.eval_clock.running(), trainer.weights_to_judge():
            last = self._final_score()
        trainer.write({"test/loss": last.loss, "test/ppl": last.perplexity})
        best: Score | None = last
        if progress.best_step != progress.step:
            best = self._best_score()
        if not self.ranks.is_first:
            return
        valid = {"last": progress.last_perplexity, "best": progress.best_perplexity}
        test = {"last": last.perplexity, "best": best.perplexity if best else math.nan}
        known = {"last": last.perplexity_without_unk, "best": best.perplexity_without_unk if best else math.nan}
        summary = {
            **trainer.place(),
            "best_step": progress.best_step,
            "valid": valid,
            "test": {**test, "unigram": self.unigram["test"]},
            "test_without_unk": known,
            **self.corpus.in_other_units("valid", valid),
            **self.corpus.in_other_units("test", test),
            "oov_rate": last.oov_rate,
            "evaluate_streams": last.streams,
            "parameters": count_parameters(self.model),
            "true_perplexity": self.corpus.true_perplexity,
            "source": self.corpus.meta["source"],
            "corpus": self.corpus.hashes(),
            "output": self.model.output.describe(self.corpus.vocabulary.counts)
            | ({"predicted": self.choice.as_dict()} if self.choice is not None else {}),
        }
        self.run_dir.write_summary(summary)
        assert trainer.metrics is not None
        trainer.metrics.finish()
        path = self.run_dir.path
        say(report.closing(trainer, corpus=self.corpus, unigram=self.unigram, last=last, best=best, run=path))

    def score(self, split: str) -> Score | None:
        """None if the run was asked to stop on the way."""
        advice = partial(scoring_advice, self.config)
        oom = explain_oom(self.trainer.device, doing="evaluating", advice=advice)
        with oom, using_threads(self.evaluation_threads):
            text = self.corpus.text(split)
            return score(
                self.model,
                text.tokens,
                marks=text.marks,
                streams=self.config.evaluate.streams,
                batch_size=self.config.evaluate.batch_size,
                eos_id=self.corpus.vocabulary.eos_id,
                unk_id=self.corpus.vocabulary.unk_id,
                label=split,
                stop=self.stop,
                ranks=self.ranks,
            )

    def save(self, trainer: Trainer, best: bool) -> None:
        state = trainer.state_dict()  # ranks add what they hold
        if trainer.metrics is None:
            return
        content = {
            **state,
            "config": plain_values(self.config),
            "vocabulary": self.packed_vocabulary,
            "corpus": self.corpus.hashes(),
            "clusters": self.choice.as_dict() if self.choice else None,
            "metrics_position": trainer.metrics.flush(),
        }
        self.writer.save(content, self.run_dir.last, also=self.run_dir.best if best else None)
        if self.stop:  # nothing else runs meanwhile, and the run reports that it is saved
            self.writer.wait()

    # ---- helpers -------------------------------------------------------------------------------------------------

    def _best_score(self) -> Score | None:
        """Test score of the best weights; None where best.pt is not (any more) what the run calls its best."""
        path = self.run_dir.best

        def load() -> None:
            content = checkpoint.load(path)
            with checkpoint.explain_damage(path):
                if content["progress"]["step"] != self.trainer.progress.best_step:
                    raise UserError(f"{path} is not of step {self.trainer.progress.best_step}.")
                checkpoint.check_shapes(content["model"], self.model, path=path)
                self.model.load_state_dict(content["model"])
                use_average(self.model, content.get("average"))

        problem = None
        try:
            self.ranks.first_then_others(load)
        except UserError as error:
            problem = error
        if self.ranks.all_max(int(problem is not None)):
            say(f"The best weights cannot be scored: {problem or 'another rank could not load them.'}")
            return None
        with self.trainer.eval_clock.running():
            return self._final_score()

    def _final_score(self) -> Score:
        result = self.score("test")
        if result is None:
            raise Stopped(self.stop.exit_code)
        return result

    def _progress_of(self, file: Path, content: dict[str, Any]) -> TrainingProgress:
        """How far a checkpoint is that fits the corpus and the settings."""
        with torch.device("meta"):
            model = build_model(self.config, self.corpus.vocabulary)
        with checkpoint.explain_damage(file):
            self.corpus.check_unchanged(content, splits=SPLITS)
            checkpoint.check_shapes(content["model"], model, path=file)
            return TrainingProgress.restored(content["progress"])
