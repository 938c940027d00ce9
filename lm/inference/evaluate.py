"""`evaluate.py`: perplexities as a table and as JSON, or one of the other modes."""

import contextlib
import itertools
import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lm.config.inference import EvaluateConfig, LineFormat, Mode, Which
from lm.data.corpus import SplitText
from lm.data.prepare import encode_folder
from lm.data.text.vocabulary import Vocabulary
from lm.inference.combining import Combination, combine, keep
from lm.inference.line_modes import print_next_words, score_lines
from lm.inference.nbest import score_nbest
from lm.inference.open_model import Opened
from lm.inference.projector import show_words
from lm.inference.unnormalized import Unnormalized
from lm.inference.word_groups import by_cluster, by_frequency, groups_table
from lm.model.language_model import LanguageModel
from lm.model.scoring import Score, score, score_of
from lm.system import checkpoint
from lm.system.console import say, table
from lm.system.devices import prepare_cpu
from lm.system.errors import UserError
from lm.system.files import json_ready, write_json
from lm.system.memory import explain_oom
from lm.system.precision import disable_tf32
from lm.training.run_dir import RunDir, start_over


def evaluate(config: EvaluateConfig) -> None:
    prepare_cpu(torch.get_num_threads())
    disable_tf32()
    sizes = {"batch_size": config.evaluate.batch_size, "streams": config.evaluate.streams}
    answers = config.mode in (Mode.score, Mode.topk)
    with contextlib.ExitStack() as stack:
        kept = None
        if config.out is not None and not answers:  # taken before anything is computed, or refused
            kept = stack.enter_context(contextlib.closing(start_over(Path(config.out), name="mixture", kind="mixture")))
        notices = sys.stderr if answers else None
        found = combine(config, device=config.device, normalize=config.evaluate.normalize, **sizes, notices=notices)  # type: ignore[arg-type]
        for name, member in zip(found.names, found.members, strict=True):
            if choice := about_choice(name, member, config.which):
                say(choice, to=notices)
        _answer(config, found, kept=kept)


def about_choice(name: str, member: Opened, which: Which) -> str | None:
    """Which of a run's checkpoints was taken, where it has two that differ."""
    if not Path(name).is_dir() or "progress" not in member.content:
        return None
    progress = member.content["progress"]
    step, best = progress["step"], progress.get("best_step")
    if which is Which.best:
        return f"{name}: its best weights by validation perplexity, of step {step:,}; which=last takes the last ones."
    if best is None or best == step:
        return f"{name}: its last weights, of step {step:,}, which are also its best."
    return f"{name}: its last weights, of step {step:,}, as a summary quotes; which=best takes those of step {best:,}."


def _answer(config: EvaluateConfig, found: Combination, *, kept: RunDir | None) -> None:
    first = found.first
    match config.mode:
        case Mode.perplexity:
            score_splits(config, found, kept=kept)
        case Mode.score:
            answer = score_nbest if config.format is LineFormat.nbest else score_lines
            answer(config, found.model, first.vocabulary, data=first.data)
        case Mode.topk:
            print_next_words(config, found.model, first.vocabulary, data=first.data)
        case Mode.projector:
            if not isinstance(first.model, LanguageModel):
                raise UserError(f"mode=projector shows the word vectors of a neural model; {first.file} has none.")
            show_words(first.model, first.vocabulary, num_words=config.words, folder=first.folder)
    for member in found.members:
        if isinstance(member.model, Unnormalized):
            say(f"Not normalised: {member.model.normalisers}", to=found.notices)


def score_splits(config: EvaluateConfig, found: Combination, *, kept: RunDir | None = None) -> None:
    """Score the splits, print tables, write JSON."""
    figures: dict[str, dict[str, Any]] = {}
    scores: dict[str, Score] = {}
    rows: dict[str, dict[str, Score]] = {}
    first, vocabulary = found.first, found.first.vocabulary
    for split, text in read_splits(config, first).items():
        with explain_oom(found.model.device, doing="evaluating", advice=partial(_advice, found.batch_size)):
            rows[split] = score_all(found, split, text)
        scores[split] = list(rows[split].values())[-1]
        figures[split] = as_figures(scores[split], vocabulary, text)
    if not found.is_plain:
        say(gains_table(rows, weights=found.weights) + "\n")
    say(as_table(figures))
    say("\n" + groups_table({name: f["by_frequency"] + f["by_cluster"] for name, f in figures.items()}))
    target = Path(config.json) if config.json else default_target(config, found)
    step = first.content.get("progress", {}).get("step")
    report = {"checkpoint": str(first.file), "step": step, "data_dir": config.data.dir, "splits": figures}
    if not found.is_plain:
        alone = {split: {name: s.perplexity for name, s in all_of.items()} for split, all_of in rows.items()}
        report |= {"mixed": found.names, "weights": found.weights, "cache": found.cache_values(), "perplexities": alone}
    if kept is not None:
        keep(found, kept, boundary=config.cache_boundary, scores=scores)
    try:
        if config.json:
            write_json(target, report)
        else:
            target = write_beside_others(target, report)
    except OSError as error:
        raise UserError(f"json={target} cannot be written: {error.strerror}. Try another json=PATH.") from None
    say(f"\n{'' if step is None else f'Step {step} of '}{first.file}; written to {target}")


def score_all(found: Combination, split: str, text: SplitText) -> dict[str, Score]:
    """The score of each model alone, of the mixture and of what the cache makes of it, which is what was asked for."""
    vocabulary = found.first.vocabulary
    reading = found.reading(split)
    if found.is_plain:
        only = score(found.model, text.tokens, marks=text.marks, unk_id=vocabulary.unk_id, **reading)
        assert only is not None, "without `stop` it is never stopped"
        return {found.names[0]: only}
    about: dict[str, Any] = {"unk_id": vocabulary.unk_id, "streams": found.streams, "marks": text.marks}
    results: dict[str, Score] = {}
    for number, (name, member) in enumerate(zip(found.names, found.members, strict=True)):
        nll, seconds = found.nll(number, text)
        shown = name if name not in results else f"{name} ({number + 1})"
        results[shown] = score_of(nll, text.tokens, model=member.model, seconds=seconds, **about)
    if len(found.members) > 1:
        mixed, seconds = found.mixed_nll(text)
        results["mixture"] = score_of(mixed, text.tokens, model=found.model, seconds=seconds, **about)
    if found.cache is not None:
        cached = score(found.model, text.tokens, marks=text.marks, unk_id=vocabulary.unk_id, **reading)
        assert cached is not None, "without `stop` it is never stopped"
        results[f"with cache={found.cache.kind.value}"] = cached
    return results


def gains_table(rows: dict[str, dict[str, Score]], *, weights: list[float]) -> str:
    """Perplexities of each model alone and of what is made of them, and how far they are below the best model alone."""
    lines = []
    for number, name in enumerate(next(iter(rows.values()))):
        weight = f"{weights[number]:.4f}" if len(weights) > 1 and number < len(weights) else ""
        cells: list[str] = []
        for scores in rows.values():
            best = min(s.perplexity for s in list(scores.values())[: len(weights)])
            gain = 1 - scores[name].perplexity / best
            cells += [f"{scores[name].perplexity:.2f}", f"{gain:.1%}" if number >= len(weights) else ""]
        lines.append([name, weight, *cells])
    return table(lines, header=["model", "weight", *(cell for split in rows for cell in (split, "gain"))])


def _advice(batch_size: int) -> str:
    if batch_size == 1:
        return "Pieces are read one at a time already; another device may have more memory."
    return f"Try evaluate.batch_size={max(1, batch_size // 4)} instead of {batch_size}, which changes no figure."


def read_splits(config: EvaluateConfig, first: Opened) -> dict[str, SplitText]:
    """The splits of the run's own corpus, or those of another folder with the run's tokenizer."""
    if config.data.dir is not None:
        return encode_folder(
            config.data.dir,
            data_config=first.data,
            vocabulary=first.vocabulary,
            splits=config.splits,
            encoding_errors=config.data.encoding_errors.value,
        )
    corpus = first.corpus(splits=config.splits)
    return {name: corpus.text(name) for name in config.splits}


def as_figures(result: Score, vocabulary: Vocabulary, text: SplitText) -> dict[str, Any]:
    """The JSON of a split."""
    frequency, clusters = by_frequency(vocabulary.counts), by_cluster(result.cutoffs, vocab_size=len(vocabulary))
    return {
        **result.as_dict(),
        "words": text.num_words,
        "perplexity_per_word": text.per_word(result.perplexity),
        "bits_per_character": text.bits_per_character(result.perplexity),
        "unigram_perplexity": vocabulary.unigram_perplexity(result.tokens_V),
        "by_frequency": [group.figures(result) for group in frequency],
        "by_cluster": [group.figures(result) for group in clusters],
    }


COLUMNS = {
    "perplexity": ("perplexity", ".2f"),
    "per word": ("perplexity_per_word", ".2f"),
    "without <unk>": ("perplexity_without_unk", ".2f"),
    "bits/char": ("bits_per_character", ".3f"),
    "unigram": ("unigram_perplexity", ".2f"),
    "OOV": ("oov_rate", ".2%"),
    "tokens": ("tokens", ","),
    "streams": ("streams", ""),
    "tokens/s": ("tokens_per_second", ",.0f"),
}


def as_table(figures: dict[str, dict[str, Any]]) -> str:
    rows = [[name, *(format(f[key], form) for key, form in COLUMNS.values())] for name, f in figures.items()]
    return table(rows, header=["split", *COLUMNS])


def default_target(config: EvaluateConfig, found: Combination) -> Path:
    """A file in the run directory, or beside a lone checkpoint, that is named by all that its figures depend on."""
    own = found.first
    in_run = own.file.parent.name == "checkpoints"
    step = own.content.get("progress", {}).get("step")
    parts = [] if in_run and own.file.name == checkpoint.LAST else [own.file.stem]
    parts += [] if step is None else [f"step-{step}"]
    parts += [Path(name).resolve().name for name in found.names[1:]]
    if found.cache is not None:
        parts.append(f"cache-{found.cache.kind.value}")
    parts += ["unnormalized"] * isinstance(own.model, Unnormalized)
    parts += [] if config.data.dir is None else [Path(config.data.dir).resolve().name]
    parts += [] if found.streams == own.streams else [f"streams-{found.streams}"]
    parts += [] if config.splits == ["valid", "test"] else config.splits
    name = "-".join(["evaluation", *(re.sub(r"[^\w.-]", "_", part)[:60] for part in parts)])
    return own.folder / f"{name}.json"


def write_beside_others(target: Path, report: dict[str, Any]) -> Path:
    """Write the figures, to a numbered file where others, of something else, have the name already."""
    for number in itertools.count(1):
        path = target if number == 1 else target.with_name(f"{target.stem}-{number}.json")
        if not path.exists() or same_figures(path, report):
            write_json(path, report)
            return path
    raise AssertionError("unreachable")


def same_figures(path: Path, report: dict[str, Any]) -> bool:
    """Whether a file holds the figures of this report, but for their speed."""
    try:
        old = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return bool(_comparable(old) == _comparable(json_ready(report)))


def _comparable(value: Any) -> Any:
    """Without speeds, and without the digits that a batch size may change."""
    if isinstance(value, dict):
        return {key: _comparable(item) for key, item in value.items() if "second" not in key}
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
