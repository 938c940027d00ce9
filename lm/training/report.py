"""What a run prints when it starts and finishes, and its summary.json."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lm.config.groups import DEPENDS_ON
from lm.data.corpus import Corpus
from lm.model.language_model import count_parameters
from lm.model.scoring import Score
from lm.output.clusters.choice import ClusterChoice
from lm.system.console import duration, next_steps, resume_command, table
from lm.system.devices import device_name, precision_name
from lm.training.trainer import Trainer, TrainingProgress

WORSE_THAN_UNIGRAM = "This is worse than the unigram model. Try a lower optim.lr, more training, or evaluate.streams=1."
OVERFIT = (
    "The last weights overfit. Use which=best (step {}, validation perplexity {}), trainer.patience=2 or a higher "
    "model.dropout."
)


def opening(
    trainer: Trainer, *, corpus: Corpus, run: str, clusters: ClusterChoice | None, origin: str | None = None
) -> str:
    """Describe corpus, model, device and clusters in a few lines; `origin` says where loaded weights come from."""
    config, model, ranks = trainer.config, trainer.model, trainer.ranks
    precision = precision_name(config.trainer.precision, trainer.device)
    parts = {"input": model.input, "core": model.core, "output": model.output, "n-grams": model.maxent}
    sizes = ", ".join(f"{name} {count_parameters(part):,}" for name, part in parts.items() if part is not None)
    lines = [f"corpus   {corpus.meta['source']}"]
    lines += [f"         {len(corpus.split('train')):,} training tokens, {_vocabulary(corpus)}"]
    if corpus.true_perplexity:
        lines += [f"         lowest possible perplexity {corpus.true_perplexity:.2f}"]
    lines += [f"model    {count_parameters(model):,} parameters: {sizes}"]
    lines += [f"device   {device_name(trainer.device)}, torch {torch.__version__}, {precision}"]
    if ranks.size > 1:
        streams = config.trainer.batch_size
        lines += [f"ranks    {ranks.size}, each with {streams // ranks.size} of the {streams} streams"]
    lines += [f"run      {run}"]
    if clusters is not None and clusters.cutoffs:
        lines += ["", table(clusters.rows(), header=clusters.HEADER), clusters.summary(), ""]
    return "\n".join(lines + ([origin] if origin else []))


def summary(
    trainer: Trainer, *, corpus: Corpus, last: Score, best: Score | None, clusters: ClusterChoice | None
) -> dict[str, Any]:
    """Return the content of summary.json."""
    progress = trainer.progress
    valid = {"last": progress.last_perplexity, "best": progress.best_perplexity}
    test = {"last": last.perplexity, "best": best.perplexity if best else math.nan}
    predicted = {} if clusters is None else {"predicted": asdict(clusters)}
    return {
        **trainer.position(),
        "best_step": progress.best_step,
        **corpus.summarize({"valid": valid, "test": test}, first=trainer.config.evaluate.max_tokens),
        "test_without_unk": {
            "last": last.perplexity_without_unk,
            "best": best.perplexity_without_unk if best else math.nan,
        },
        "oov_rate": last.oov_rate,
        "evaluate_streams": last.streams,
        "parameters": count_parameters(trainer.model),
        "true_perplexity": corpus.true_perplexity,
        "output": {**trainer.model.output.describe(corpus.vocabulary.counts), **predicted},
    }


def closing(trainer: Trainer, *, corpus: Corpus, last: Score, best: Score | None, run: Path) -> str:
    """Format final perplexities, the run's location, and suggested commands."""
    progress, first = trainer.progress, trainer.config.evaluate.max_tokens
    unigram = {split: corpus.unigram_perplexity(split, first=first) for split in ("valid", "test")}
    rows: list[list[object]] = [["unigram", _number(unigram["valid"]), _number(unigram["test"])]]
    if true := corpus.true_perplexity:
        rows.append(["true source", _number(true), _number(true)])
    rows.append([f"last (step {progress.step})", _number(progress.last_perplexity), _number(last.perplexity)])
    if progress.best_step != progress.step:
        best_test = _number(best.perplexity if best else math.nan)
        rows.append([f"best (step {progress.best_step})", _number(progress.best_perplexity), best_test])
    valid, test = (corpus.text("valid"), progress.last_perplexity), (corpus.text("test"), last.perplexity)
    if valid[0].marks is not None:
        rows.append(["last, per word", *(_number(text.per_word(value)) for text, value in (valid, test))])
    rows.append(["last, bits per character", *(f"{text.bits_per_character(v):.3f}" for text, v in (valid, test))])
    further = _further(trainer)
    return "\n".join(
        [
            "",
            table(rows, header=["perplexity", "valid", "test"]),
            "",
            f"Test perplexity {_number(last.perplexity)} (unigram: {_number(unigram['test'])}); "
            f"{_excluding_unknown(last)}. Scored {f'as {last.streams} streams' if last.streams else 'line by line'}"
            f"{on_first_tokens(trainer, last)}.",
            *_notes(trainer.progress, unigram, test=last.perplexity),
            f"Trained on {trainer.tokens:,} tokens in {duration(trainer.train_clock.seconds)}, stopped at "
            f"{' and '.join(f'trainer.{key}={limit}' for key, limit in trainer.limits_reached.items())}; evaluated in "
            f"{duration(trainer.eval_clock.seconds)}. Everything is in {run}",
            *next_steps(run, *([f"{resume_command(run)} {further}"] if further else [])),
        ]
    )


def _notes(progress: TrainingProgress, unigram: dict[str, float], *, test: float) -> list[str]:
    if progress.best_perplexity < unigram["valid"] <= progress.last_perplexity:
        return [OVERFIT.format(progress.best_step, _number(progress.best_perplexity))]
    return [WORSE_THAN_UNIGRAM] if test > unigram["test"] else []


def on_first_tokens(trainer: Trainer, score: Score) -> str:
    return "" if trainer.config.evaluate.max_tokens is None else f" on the first {score.tokens:,} tokens"


def _further(trainer: Trainer) -> str | None:
    """Return settings that continue a finished run; None if its schedule forbids that."""
    reached = trainer.limits_reached
    if reached.keys() & set(DEPENDS_ON.get(trainer.config.optim.schedule, ())):
        return None
    counts = trainer.limits
    doublings = {key: max(1, math.ceil(math.log2((counts[key] + 1) / limit))) for key, limit in reached.items()}
    return " ".join(f"trainer.{key}={limit * 2 ** doublings[key]}" for key, limit in reached.items())


def _vocabulary(corpus: Corpus) -> str:
    """Describe the vocabulary size and the OOV rate of the validation text."""
    record = corpus.meta["splits"]["valid"]
    if "known_word_tokens" not in record:
        outside = record["oov"] / record["tokens"]
        return f"{len(corpus.vocabulary):,} words, {outside:.1%} of the validation text unknown"
    outside = 1 - record["known_word_tokens"] / record["word_tokens"]
    return (
        f"{len(corpus.vocabulary):,} subwords, {record['tokens'] / record['word_tokens']:.2f} per word; {outside:.1%} "
        "of the validation text outside the word vocabulary"
    )


def _excluding_unknown(score: Score) -> str:
    known = _number(score.perplexity_without_unk)
    if score.in_words is None:
        return f"{known} excluding <unk>, {score.oov_rate:.1%} of tokens"
    return f"{known} per word excluding the {score.oov_rate:.1%} of words outside the vocabulary"


def _number(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "-"
