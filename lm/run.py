"""One training run, from settings to summary: gather the parts, train or continue, report."""

import contextlib
import math
import platform
from dataclasses import replace
from typing import Any

import torch

from lm import checkpoint
from lm.building import build_model, choose_clusters, pack_vocabulary, pick_device, word_classes
from lm.config import ClusteredConfig, Config
from lm.console import duration, python_command, say, table
from lm.data import open_corpus
from lm.data.batches import Streams
from lm.data.corpus import Corpus
from lm.errors import UserError
from lm.interrupt import Stopped, StopRequest
from lm.metrics import Metrics
from lm.model.language_model import count_parameters
from lm.optim import Optimizer
from lm.output.clusters import Choice
from lm.run_dir import RunDir, changed_keys, choose
from lm.scoring import Score, score
from lm.trainer import Standing, Trainer
from lm.validation import flatten, make_config, plain_values


def train(config: Config, *, overrides: list[str]) -> None:
    """Train to the limits; on Ctrl-C or SIGTERM save and raise Stopped."""
    path, file = choose(config)
    content = checkpoint.load(file) if file is not None else None
    if content is not None:
        config = continued(config, content, overrides=overrides)
    device = pick_device(config.trainer.device)
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    corpus = open_corpus(config.data, notice=say)
    kept = content.get("clusters") if content is not None else None
    choice = Choice.from_dict(kept) if kept else None
    if isinstance(config.output, ClusteredConfig) and config.output.cutoffs == "auto":
        choice = choose_clusters(config, corpus, device=device, notice=say)
        config = replace(config, output=replace(config.output, cutoffs=choice.cutoffs))
    with contextlib.closing(RunDir(path)) as run, StopRequest() as stop:
        Run(config, corpus=corpus, run_dir=run, device=device, stop=stop, content=content, choice=choice).execute()


class Run:
    """The parts of a run, put together."""

    def __init__(
        self,
        config: Config,
        *,
        corpus: Corpus,
        run_dir: RunDir,
        device: torch.device,
        stop: StopRequest,
        content: dict[str, Any] | None,
        choice: Choice | None = None,
    ) -> None:
        self.config, self.corpus, self.run_dir, self.stop, self.choice = config, corpus, run_dir, stop, choice
        streams = Streams(
            corpus.split("train"),
            batch_size=config.trainer.batch_size,
            bptt=config.trainer.bptt,
            eos_id=corpus.vocabulary.eos_id,
        )
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
            evaluate=lambda: self.score("valid", stop=stop),
            save=self.save,
            stop=stop,
        )
        if content is not None:
            self.trainer.load_state_dict(content)
        self.unigram = {split: corpus.unigram_perplexity(split) for split in ("valid", "test")}

    def execute(self) -> None:
        """Train, score the test split, and say what came out."""
        say(self.banner())
        try:
            self.trainer.run()
            self.finish()
        except Stopped:
            say(f"Stopped and saved at step {self.trainer.standing.step}. Go on with:\n  {self.resume_command()}")
            raise
        finally:
            self.trainer.metrics.close()

    def finish(self) -> None:
        """Test perplexity of the last and of the best weights, the summary in the directory and on the screen."""
        trainer = self.trainer
        standing = trainer.standing
        last = self._final_score()
        trainer.metrics.write({**trainer.place(), "test/loss": last.loss, "test/ppl": last.perplexity})
        best = last
        if standing.best_step != standing.step and self.run_dir.best.exists():
            self.model.load_state_dict(checkpoint.load(self.run_dir.best)["model"])
            best = self._final_score()
        summary = {
            **trainer.place(),
            "best_step": standing.best_step,
            "valid": {"last": standing.last_perplexity, "best": standing.best_perplexity},
            "test": {"last": last.perplexity, "best": best.perplexity, "unigram": self.unigram["test"]},
            "test_without_unk": {"last": last.perplexity_without_unk, "best": best.perplexity_without_unk},
            "oov_rate": last.oov_rate,
            "evaluate_streams": last.streams,
            "parameters": count_parameters(self.model),
            "true_perplexity": self.corpus.true_perplexity,
            "output": self.model.output.describe(),
        }
        self.run_dir.write_summary(summary)
        say(self.closing(last, best))

    def score(self, split: str, *, stop: StopRequest | None = None) -> Score | None:
        return score(
            self.model,
            self.corpus.split(split),
            streams=self.config.evaluate.streams,
            batch_size=self.config.evaluate.batch_size,
            eos_id=self.corpus.vocabulary.eos_id,
            unk_id=self.corpus.vocabulary.unk_id,
            label=split,
            stop=stop,
        )

    def save(self, trainer: Trainer, best: bool) -> None:
        content = {
            **trainer.state_dict(),
            "config": plain_values(self.config),
            "vocabulary": pack_vocabulary(self.corpus.vocabulary),
            "clusters": self.choice.as_dict() if self.choice else None,
            "metrics_position": trainer.metrics.flush(),
        }
        try:
            checkpoint.save(content, self.run_dir.last, also=self.run_dir.best if best else None)
        except OSError as error:
            raise UserError(
                f"The checkpoint {self.run_dir.last} cannot be written: {error.strerror}. The one before it is kept; "
                "free some space and go on with resume=auto."
            ) from None

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

    def closing(self, last: Score, best: Score) -> str:
        """Perplexities, where everything is, and what to type next."""
        trainer, standing, path = self.trainer, self.trainer.standing, self.run_dir.path
        rows: list[list[object]] = [["unigram", _figure(self.unigram["valid"]), _figure(self.unigram["test"])]]
        if true := self.corpus.true_perplexity:
            rows.append(["true source", _figure(true), _figure(true)])
        rows.append([f"last (step {standing.step})", _figure(standing.last_perplexity), _figure(last.perplexity)])
        rows.append([f"best (step {standing.best_step})", _figure(standing.best_perplexity), _figure(best.perplexity)])
        more_epochs = 2 * (self.config.trainer.max_epochs or trainer.epoch or 1)
        return "\n".join(
            [
                "",
                table(rows, header=["perplexity", "valid", "test"]),
                "",
                f"Test perplexity {_figure(last.perplexity)} is {last.perplexity / self.unigram['test']:.2f} of the "
                f"unigram's ({last.streams} streams, {last.oov_rate:.1%} <unk>).",
                f"Trained on {trainer.tokens:,} tokens in {duration(trainer.train_clock.seconds)}, "
                f"evaluated in {duration(trainer.eval_clock.seconds)}. Everything is in {path}",
                "",
                "Next:",
                f"  {python_command()} -m tensorboard.main --logdir {path.parent}",
                f"  {python_command()} evaluate.py checkpoint={path}",
                f"  {self.resume_command()} trainer.max_epochs={more_epochs}",
            ]
        )

    def resume_command(self) -> str:
        return f"{python_command()} train.py resume={self.run_dir.path}"

    # ---- helpers -------------------------------------------------------------------------------------------------

    def _final_score(self) -> Score:
        result = self.score("test", stop=self.stop)
        if result is None:
            raise Stopped(self.stop.exit_code)
        return result

    def _check_fits(self, content: dict[str, Any]) -> None:
        if content["vocabulary"]["hash"] != self.corpus.vocabulary.hash:
            raise UserError(
                f"The vocabulary of {self.corpus.path} is not the one {self.run_dir.path} was trained with: the corpus "
                "has changed since. Restore it, or start a new run without resume."
            )
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
