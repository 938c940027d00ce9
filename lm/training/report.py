"""What a run prints before it begins and when it has finished."""

import math
import platform
import shlex
from pathlib import Path

import torch

from lm.config.schema import TrainConfig
from lm.data.corpus import Corpus
from lm.model.language_model import LanguageModel, count_parameters
from lm.model.scoring import Score
from lm.output.clusters.choice import ClusterChoice
from lm.system.arithmetic import precision_name
from lm.system.console import duration, python_command, table
from lm.training.next_steps import next_steps
from lm.training.trainer import Trainer


def opening(
    config: TrainConfig,
    model: LanguageModel,
    *,
    corpus: Corpus,
    run: str,
    choice: ClusterChoice | None,
    num_ranks: int = 1,
) -> str:
    """Corpus, model, device and clusters in a few lines; `run` is where the files will be."""
    device = model.device
    precision = precision_name(config.trainer.precision, device)
    parts = {"input": model.input, "core": model.core, "output": model.output, "n-grams": model.maxent}
    sizes = ", ".join(f"{name} {count_parameters(part):,}" for name, part in parts.items() if part is not None)
    lines = [
        f"corpus   {corpus.meta['source']}",
        f"         {len(corpus.split('train')):,} training tokens, {_vocabulary(corpus)}",
        f"model    {count_parameters(model):,} parameters: {sizes}",
        f"device   {device_name(device)}, torch {torch.__version__}, {precision}",
        f"run      {run}",
    ]
    if num_ranks > 1:
        streams = config.trainer.batch_size
        lines.insert(4, f"ranks    {num_ranks}, each with {streams // num_ranks} of the {streams} streams")
    if corpus.true_perplexity:
        lines.insert(2, f"         lowest possible perplexity {corpus.true_perplexity:.2f}")
    if choice is not None and choice.cutoffs:
        lines += ["", table(choice.rows(), header=choice.HEADER), choice.summary(), ""]
    return "\n".join(lines)


def closing(
    trainer: Trainer, *, corpus: Corpus, unigram: dict[str, float], last: Score, best: Score | None, run: Path
) -> str:
    """Perplexities, where the files are, and what to type next."""
    progress = trainer.progress
    rows: list[list[object]] = [["unigram", _figure(unigram["valid"]), _figure(unigram["test"])]]
    if true := corpus.true_perplexity:
        rows.append(["true source", _figure(true), _figure(true)])
    rows.append([f"last (step {progress.step})", _figure(progress.last_perplexity), _figure(last.perplexity)])
    best_test = _figure(best.perplexity if best else math.nan)
    rows.append([f"best (step {progress.best_step})", _figure(progress.best_perplexity), best_test])
    valid, test = corpus.extent("valid"), corpus.extent("test")
    per_word = valid.per_word(progress.last_perplexity), test.per_word(last.perplexity)
    bits = valid.bits_per_character(progress.last_perplexity), test.bits_per_character(last.perplexity)
    rows.append(["last, per word", *map(_figure, per_word)])
    rows.append(["last, bits per character", *(f"{value:.3f}" for value in bits)])
    further = _further(trainer)
    return "\n".join(
        [
            "",
            table(rows, header=["perplexity", "valid", "test"]),
            "",
            f"Test perplexity {_figure(last.perplexity)}, {last.perplexity / unigram['test']:.2f} of the unigram's "
            f"({last.streams} streams; {_without_unknown(last)}).",
            f"Trained on {trainer.tokens:,} tokens in {duration(trainer.train_clock.seconds)}, stopped at "
            f"{' and '.join(f'trainer.{key}={limit}' for key, limit in trainer.reached.items())}; evaluated in "
            f"{duration(trainer.eval_clock.seconds)}. Everything is in {run}",
            *next_steps(run, *([f"{resume_command(run)} {further}"] if further else [])),
        ]
    )


def resume_command(run: Path) -> str:
    return f"{python_command()} train.py {shlex.quote(f'resume={run}')}"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    threads = torch.get_num_threads()
    return f"{device} ({threads} thread{'s' if threads > 1 else ''}, {platform.machine()})"


def _further(trainer: Trainer) -> str | None:
    """The setting with which a finished run continues; None if its schedule forbids that."""
    reached = trainer.reached
    if reached.keys() & set(trainer.config.optim.schedule.counted_from):
        return None
    amounts = trainer.amounts
    doublings = {key: max(1, math.ceil(math.log2((amounts[key] + 1) / limit))) for key, limit in reached.items()}
    return " ".join(f"trainer.{key}={limit * 2 ** doublings[key]}" for key, limit in reached.items())


def _vocabulary(corpus: Corpus) -> str:
    """The size of the vocabulary, and the share of the validation text that is not in it."""
    record, extent = corpus.meta["splits"]["valid"], corpus.extent("valid")
    if "known_word_tokens" not in record:
        outside = record["oov"] / extent.tokens
        return f"{len(corpus.vocabulary):,} words, {outside:.1%} of the validation text unknown"
    outside = 1 - record["known_word_tokens"] / extent.words
    return (
        f"{len(corpus.vocabulary):,} subwords, {extent.tokens / extent.words:.2f} per word; {outside:.1%} of the "
        "validation text outside the word vocabulary"
    )


def _without_unknown(score: Score) -> str:
    known = _figure(score.perplexity_without_unk)
    if score.in_words is None:
        return f"{known} without the {score.oov_rate:.1%} <unk>"
    return f"{known} per word without the {score.oov_rate:.1%} outside the word vocabulary"


def _figure(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "-"
