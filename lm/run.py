"""One training run, from settings to summary: gather the parts, train or continue, report."""

import contextlib
import math
import platform
import shlex
from dataclasses import replace
from typing import Any

import torch

from lm import checkpoint
from lm.building import build_model, choose_clusters, pack_vocabulary, pick_device, pick_threads, word_classes
from lm.checkpoint_writer import CheckpointWriter
from lm.config import ClusteredConfig, Config, Schedule
from lm.console import duration, python_command, say, table
from lm.data import open_corpus
from lm.data.batches import Streams
from lm.data.corpus import SPLITS, Corpus
from lm.errors import UserError
from lm.interrupt import Stopped, StopRequest
from lm.metrics import Metrics
from lm.model.language_model import count_parameters
from lm.optim import Optimizer
from lm.output.clusters import Choice
from lm.processor import prepare_processor
from lm.run_dir import RunDir, changed_keys, choose, start
from lm.scoring import Score, score
from lm.trainer import Standing, Trainer
from lm.validation import flatten, make_config, plain_values


def train(config: Config, *, overrides: list[str]) -> None:
    """Train to the limits; on Ctrl-C or SIGTERM save and raise Stopped."""
    path, file = choose(config)
    content = None
    with contextlib.ExitStack() as stack:
        if path is not None and file is not None:
            run_dir = stack.enter_context(contextlib.closing(RunDir(path)))
            content = checkpoint.load(file)  # under the lock, so that nobody replaces it any more
            with checkpoint.damage_told(file):
                config = continued(config, content, overrides=overrides)
            if file != run_dir.last:
                # From here on this is the run's last state; metrics.jsonl is cut back to it.
                checkpoint.share(file, run_dir.last)
        device = pick_device(config.trainer.device, key="trainer.device")
        prepare_processor(pick_threads(config))
        corpus = open_corpus(config.data, notice=say)
        streams = Streams(
            corpus.split("train"),
            batch_size=config.trainer.batch_size,
            bptt=config.trainer.bptt,
            eos_id=corpus.vocabulary.eos_id,
        )
        kept = content.get("clusters") if content is not None else None
        choice = Choice.from_dict(kept) if kept else None
        if isinstance(config.output, ClusteredConfig) and config.output.cutoffs == "auto":
            choice = choose_clusters(config, corpus, device=device, notice=say)
            config = replace(config, output=replace(config.output, cutoffs=choice.cutoffs))
        if content is None:  # made only now, so that a mistake in what comes before leaves no empty directory
            run_dir = stack.enter_context(contextlib.closing(start(config, path)))
        Run(
            config,
            corpus=corpus,
            streams=streams,
            run_dir=run_dir,
            device=device,
            content=content,
            choice=choice,
        ).execute()


class Run:
    """The parts of a run, put together."""

    def __init__(
        self,
        config: Config,
        *,
        corpus: Corpus,
        streams: Streams,
        run_dir: RunDir,
        device: torch.device,
        content: dict[str, Any] | None,
        choice: Choice | None = None,
    ) -> None:
        self.config, self.corpus, self.run_dir, self.choice = config, corpus, run_dir, choice
        self.stop, self.writer = StopRequest(), CheckpointWriter()
        self.packed_vocabulary = pack_vocabulary(corpus.vocabulary)
        if content is not None:
            self._check_fits(content)
        classes = word_classes(config, corpus, notice=say)
        self.model = build_model(config, corpus.vocabulary, classes=classes).to(device)
        self.model.output.choice = choice
        self.run_dir.write_config(config)
        (run_dir.path / "summary.json").unlink(missing_ok=True)
        self.trainer = Trainer(
            self.model,
            optimizer=Optimizer(self.model, config.optim),
            streams=streams,
            config=config,
            standing=Standing(**content["standing"]) if content else Standing(),
            metrics=Metrics(
                run_dir.path,
                position=content["metrics_position"] if content else 0,
                texts={"config": _as_markdown(config)} | ({"clusters": choice.as_markdown()} if choice else {}),
            ),
            evaluate=lambda: self.score("valid"),
            save=self.save,
            stop=self.stop,
        )
        if content is not None:
            own = self.trainer.state_dict()
            with checkpoint.damage_told(run_dir.last):
                for key in ("optimizer", "hidden", "loss_sum"):
                    checkpoint.check_state(own[key], content[key], path=run_dir.last, place=key)
                self.trainer.load_state_dict(content)
        self.unigram = {split: corpus.unigram_perplexity(split) for split in ("valid", "test")}

    def execute(self) -> None:
        """Train, score the test split, and say what came out."""
        say(self.banner())
        try:
            with self.stop:
                self.trainer.run()
                self.writer.wait()
                self.finish()
        except Stopped:
            say(f"Stopped and saved at step {self.trainer.standing.step}. Go on with:\n  {self.resume_command()}")
            raise
        finally:
            self.writer.close()
            self.trainer.metrics.close()

    def finish(self) -> None:
        """Test perplexity of the last and of the best weights, the summary in the directory and on the screen."""
        trainer = self.trainer
        standing = trainer.standing
        with trainer.eval_clock.running():
            last = self._final_score()
        trainer.metrics.write({**trainer.place(), "test/loss": last.loss, "test/ppl": last.perplexity})
        best: Score | None = last
        if standing.best_step != standing.step:
            best = self._best_score()
        summary = {
            **trainer.place(),
            "best_step": standing.best_step,
            "valid": {"last": standing.last_perplexity, "best": standing.best_perplexity},
            "test": {
                "last": last.perplexity,
                "best": best.perplexity if best else None,
                "unigram": self.unigram["test"],
            },
            "test_without_unk": {
                "last": last.perplexity_without_unk,
                "best": best.perplexity_without_unk if best else None,
            },
            "oov_rate": last.oov_rate,
            "evaluate_streams": last.streams,
            "parameters": count_parameters(self.model),
            "true_perplexity": self.corpus.true_perplexity,
            "output": self.model.output.describe(),
        }
        self.run_dir.write_summary(summary)
        say(self.closing(last, best))

    def score(self, split: str) -> Score | None:
        """None if the run was asked to stop on the way."""
        return score(
            self.model,
            self.corpus.split(split),
            streams=self.config.evaluate.streams,
            batch_size=self.config.evaluate.batch_size,
            eos_id=self.corpus.vocabulary.eos_id,
            unk_id=self.corpus.vocabulary.unk_id,
            label=split,
            stop=self.stop,
        )

    def save(self, trainer: Trainer, best: bool) -> None:
        content = {
            **trainer.state_dict(),
            "config": plain_values(self.config),
            "vocabulary": self.packed_vocabulary,
            "corpus": self.corpus.hashes(),
            "clusters": self.choice.as_dict() if self.choice else None,
            "metrics_position": trainer.metrics.flush(),
        }
        self.writer.save(content, self.run_dir.last, also=self.run_dir.best if best else None)
        if self.stop:  # nothing goes on meanwhile, and whoever stopped the run is told that it is saved
            self.writer.wait()

    # ---- words -------------------------------------------------------------------------------------------------

    def banner(self) -> str:
        """What is about to happen, in a few lines."""
        corpus, model, trainer = self.corpus, self.model, self.trainer
        parts = {"embedding": model.embedding, "LSTM": model.core, "output": model.output}
        sizes = ", ".join(f"{name} {count_parameters(part):,}" for name, part in parts.items())
        oov_rate = corpus.meta["splits"]["valid"]["oov"] / len(corpus.split("valid"))
        lines = [
            f"corpus   {corpus.meta['source']}",
            f"         {len(corpus.split('train')):,} training tokens, {len(corpus.vocabulary):,} words, "
            f"{oov_rate:.1%} of the validation text outside them",
            f"model    {count_parameters(model):,} parameters: {sizes}",
            f"device   {_device_name(trainer.device)}, torch {torch.__version__}",
            f"run      {self.run_dir.path}",
        ]
        if corpus.true_perplexity:
            lines.insert(2, f"         no model can have a lower perplexity than {corpus.true_perplexity:.2f}")
        if self.choice is not None and self.choice.cutoffs:
            lines += ["", table(self.choice.rows(), header=self.choice.HEADER), self.choice.summary(), ""]
        if trainer.standing.step:
            lines.append(f"resumed  at step {trainer.standing.step:,}")
        return "\n".join(lines)

    def closing(self, last: Score, best: Score | None) -> str:
        """Perplexities, where everything is, and what to type next."""
        trainer, standing, path = self.trainer, self.trainer.standing, self.run_dir.path
        rows: list[list[object]] = [["unigram", _figure(self.unigram["valid"]), _figure(self.unigram["test"])]]
        if true := self.corpus.true_perplexity:
            rows.append(["true source", _figure(true), _figure(true)])
        rows.append([f"last (step {standing.step})", _figure(standing.last_perplexity), _figure(last.perplexity)])
        best_test = _figure(best.perplexity if best else math.nan)
        rows.append([f"best (step {standing.best_step})", _figure(standing.best_perplexity), best_test])
        further = self._further()
        return "\n".join(
            [
                "",
                table(rows, header=["perplexity", "valid", "test"]),
                "",
                f"Test perplexity {_figure(last.perplexity)} is {last.perplexity / self.unigram['test']:.2f} of the "
                f"unigram's ({last.streams} streams; {_figure(last.perplexity_without_unk)} without the "
                f"{last.oov_rate:.1%} <unk>).",
                f"Trained on {trainer.tokens:,} tokens in {duration(trainer.train_clock.seconds)}, "
                f"evaluated in {duration(trainer.eval_clock.seconds)}. Everything is in {path}",
                "",
                "Next:",
                f"  {python_command()} -m tensorboard.main --logdir {shlex.quote(str(path.parent))}",
                f"  {python_command()} evaluate.py {shlex.quote(f'checkpoint={path}')}",
                *([f"  {self.resume_command()} {further}"] if further else []),
            ]
        )

    def resume_command(self) -> str:
        return f"{python_command()} train.py {shlex.quote(f'resume={self.run_dir.path}')}"

    def _further(self) -> str | None:
        """The setting that lets a finished run go on; None where its schedule forbids that."""
        limits = self.config.trainer
        reached = {
            "max_epochs": self.trainer.epoch,
            "max_steps": self.trainer.standing.step,
            "max_tokens": self.trainer.tokens,
            "max_seconds": self.trainer.train_clock.seconds,
        }
        ended_by = [key for key, value in reached.items() if (limit := getattr(limits, key)) and value >= limit]
        if "max_epochs" in ended_by and self.config.optim.schedule is Schedule.halve_after_half:
            return None
        return " ".join(f"trainer.{key}={2 * getattr(limits, key):g}" for key in ended_by)

    # ---- helpers -------------------------------------------------------------------------------------------------

    def _best_score(self) -> Score | None:
        """Test score of the best weights; None where best.pt is not (any more) what the run calls its best."""
        path = self.run_dir.best
        try:
            content = checkpoint.load(path)
            with checkpoint.damage_told(path):
                if content["standing"]["step"] != self.trainer.standing.best_step:
                    raise UserError(f"{path} is not of step {self.trainer.standing.best_step}.")
                checkpoint.check_shapes(content["model"], self.model, path=path)
                self.model.load_state_dict(content["model"])
        except UserError as error:
            say(f"The best weights cannot be scored: {error}")
            return None
        with self.trainer.eval_clock.running():
            return self._final_score()

    def _final_score(self) -> Score:
        result = self.score("test")
        if result is None:
            raise Stopped(self.stop.exit_code)
        return result

    def _check_fits(self, content: dict[str, Any]) -> None:
        self.corpus.check_unchanged(content, splits=SPLITS)
        with torch.device("meta"):
            model = build_model(self.config, self.corpus.vocabulary)
        checkpoint.check_shapes(content["model"], model, path=self.run_dir.last)


def continued(config: Config, content: dict[str, Any], *, overrides: list[str]) -> Config:
    """The settings of a continued run: its own, but for those asked for now, which must be free to change."""
    old, new = content["config"], plain_values(config)
    if new["output"].get("cutoffs") == "auto":
        # What was chosen when the run began stays chosen, whatever the machine would say today.
        new["output"]["cutoffs"] = old["output"].get("cutoffs")
    if config.resume != "auto":
        asked = [override.lstrip("+~").partition("=")[0] for override in overrides]
        if "experiment" not in asked:
            new = _replace(old, {key: v for key, v in flatten(new).items() if _is_asked(key, asked)})
    differing = list(changed_keys(old, new))
    if differing:
        listed = "\n".join(f"  {key}: {before!r} in the run, {after!r} now" for key, before, after in differing)
        raise UserError(
            f"A run can be resumed only with its own settings, but for limits, logging and device. These differ:\n"
            f"{listed}\nLeave them out, or start a new run without resume."
        )
    return make_config(new, Config)


def _is_asked(key: str, asked: list[str]) -> bool:
    return key in ("run_dir", "resume") or any(key == name or key.startswith(f"{name}.") for name in asked)


def _replace(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Nested values with some dotted keys set anew."""
    result = {key: _replace(value, {}) if isinstance(value, dict) else value for key, value in values.items()}
    for key, value in changes.items():
        *groups, last = key.split(".")
        place = result
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = value
    return result


def _figure(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "-"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({torch.get_num_threads()} threads, {platform.machine()})"


def _as_markdown(config: Config) -> str:
    rows = "\n".join(f"| {key} | {value} |" for key, value in flatten(plain_values(config)).items())
    return f"| setting | value |\n|---|---|\n{rows}"
