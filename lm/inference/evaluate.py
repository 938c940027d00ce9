"""`evaluate.py`: print perplexities as tables and write JSON, or run another mode."""

import itertools
import json
import re
import sys
from contextlib import ExitStack, closing, redirect_stdout
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lm.config.inference import EvaluateConfig, Which
from lm.data.corpus import SplitText
from lm.data.prepare import encode_folder
from lm.data.text.vocabulary import Vocabulary
from lm.inference.open_model import LoadedModel, load_model
from lm.inference.word_groups import by_cluster, by_frequency, groups_table, score_groups
from lm.model.scoring import Score
from lm.system import checkpoint
from lm.system.console import say, table
from lm.system.devices import disable_tf32, prepare_cpu
from lm.system.errors import UserError
from lm.system.files import json_ready, write_json
from lm.system.memory import explain_oom, smaller_batch
from lm.system.tree import map_leaves
from lm.training.run_dir import RunDir, start_over


def evaluate(config: EvaluateConfig) -> None:
    """Load the model and run the selected mode."""
    prepare_cpu(torch.get_num_threads())
    disable_tf32()
    writes_lines = config.mode in ("score", "surprisal", "topk")
    notices = sys.stderr if writes_lines else sys.stdout  # stdout is reserved for output lines
    with ExitStack() as stack:
        run_dir = None
        if config.out is not None and not writes_lines:  # lock or reject it before computing anything
            run_dir = stack.enter_context(closing(start_over(Path(config.out), name="mixture", kind="mixture")))
        with redirect_stdout(notices):
            scoring = replace(config.evaluate, dynamic=config.dynamic)
            loaded = load_model(config, device=config.device, scoring=scoring)
            for member in loaded.members:
                say_which(member, config.which)
        if config.mode == "perplexity":
            score_splits(config, loaded, run_dir)
        else:
            run_mode(config, loaded)
        if not config.evaluate.normalize:
            from lm.inference.unnormalized import Unnormalized

            for member in loaded.members:
                if isinstance(member.model, Unnormalized):
                    say(f"Not normalized: {member.model.report()}", to=notices)


def run_mode(config: EvaluateConfig, loaded: LoadedModel) -> None:
    """Run a mode other than perplexity; each imports only its own module."""
    if config.mode == "score" and config.format in ("nbest", "kaldi"):
        from lm.inference.nbest import score_nbest as run
    elif config.mode == "score":
        from lm.inference.lines import score_lines as run
    elif config.mode == "surprisal":
        from lm.inference.surprisal import write_surprisals as run
    elif config.mode == "topk":
        from lm.inference.lines import print_next_words as run
    else:
        from lm.inference.projector import show_words as run
    run(config, loaded)


def say_which(loaded: LoadedModel, which: Which) -> None:
    """Print which checkpoint is used, if the run has two that differ."""
    progress = loaded.content.get("progress")
    if progress is None or not Path(loaded.name).is_dir():
        return
    step, best = progress["step"], progress.get("best_step")
    if which == "best":
        say(f"{loaded.name}: using best.pt (step {step:,}).")
    elif best is None or best == step:
        say(f"{loaded.name}: using last.pt (step {step:,}), which is also the best.")
    else:
        say(f"{loaded.name}: using last.pt (step {step:,}); pass which=best for best.pt (step {best:,}).")


def score_splits(config: EvaluateConfig, loaded: LoadedModel, run_dir: RunDir | None) -> None:
    """Score the splits, print tables and write JSON; optionally save a combined model as a run."""
    rows: dict[str, dict[str, Score]] = {}
    whole_model: dict[str, Score] = {}
    results: dict[str, dict[str, Any]] = {}
    for split, whole in read_splits(config, loaded).items():
        text = whole.first(config.evaluate.max_tokens)
        with explain_oom(loaded.model.device, doing="evaluating", advice=partial(smaller_batch, loaded.batch_size)):
            rows[split] = loaded.scores(split, text)
        *_, whole_model[split] = rows[split].values()
        results[split] = as_dict(whole_model[split], text, loaded.vocabulary)
    step = loaded.content.get("progress", {}).get("step")
    report = {"checkpoint": str(loaded.file), "step": step, "data_dir": config.data.dir, "splits": results}
    if config.evaluate.dynamic is not None:
        from lm.inference.dynamic import Dynamic

        models = [member.model for member in loaded.members]
        report["dynamic"] = [asdict(model.settings) if isinstance(model, Dynamic) else None for model in models]
    if config.mix or config.cache:
        from lm.inference.mixture import CombinedModel, save_as_run

        assert isinstance(loaded, CombinedModel)
        say(loaded.gains_table(rows) + "\n")
        alone = {split: {name: s.perplexity for name, s in scores.items()} for split, scores in rows.items()}
        report |= {**loaded.settings(), "perplexities": alone}
        if run_dir is not None:
            save_as_run(loaded, run_dir, boundary=config.cache_boundary, scores=whole_model)
    mark = "" if config.evaluate.dynamic is None else ", dynamic"
    cells = [[split + mark, *(format(r[key], form) for key, form in COLUMNS.values())] for split, r in results.items()]
    say(table(cells, header=["split", *COLUMNS]))
    say("\n" + groups_table({split: r["by_frequency"] + r["by_cluster"] for split, r in results.items()}))
    path = write_report(report, config, loaded)
    say(f"\n{'' if step is None else f'Step {step} of '}{loaded.file}; written to {path}")


def read_splits(config: EvaluateConfig, loaded: LoadedModel) -> dict[str, SplitText]:
    """Read the splits of the run's corpus or of another folder, using the run's tokenizer."""
    if config.data.dir is not None:
        return encode_folder(
            config.data.dir,
            data_config=loaded.data,
            vocabulary=loaded.vocabulary,
            splits=config.splits,
            encoding_errors=config.data.encoding_errors,
        )
    corpus = loaded.corpus(config.splits)
    return {split: corpus.text(split) for split in config.splits}


def as_dict(score: Score, text: SplitText, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return a split's results for JSON."""
    return {
        **score.as_dict(),
        "words": text.num_words,
        "perplexity_per_word": text.per_word(score.perplexity),
        "bits_per_character": text.bits_per_character(score.perplexity),
        "unigram_perplexity": vocabulary.unigram_perplexity(score.tokens_V),
        "by_frequency": score_groups(score, by_frequency(vocabulary.counts)),
        "by_cluster": score_groups(score, by_cluster(score.cutoffs, vocab_size=len(vocabulary))),
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


def write_report(report: dict[str, Any], config: EvaluateConfig, loaded: LoadedModel) -> Path:
    """Write JSON to `json`, or to a file named after the evaluation without overwriting other results."""
    path = Path(config.json) if config.json else default_path(config, loaded)
    try:
        if not config.json:
            numbered = (path.with_name(f"{path.stem}-{i}.json") for i in itertools.count(2))
            path = next(p for p in itertools.chain([path], numbered) if not p.exists() or holds(p, report))
        write_json(path, report)
    except OSError as error:
        raise UserError(f"json={path} cannot be written: {error.strerror}. Try another json=PATH.") from None
    return path


def default_path(config: EvaluateConfig, loaded: LoadedModel) -> Path:
    """Return a path in the run directory, or next to a lone checkpoint, named after all that affects results."""
    step = loaded.content.get("progress", {}).get("step")
    is_last = loaded.file.parent.name == "checkpoints" and loaded.file.name == checkpoint.LAST
    parts = [] if is_last else [loaded.file.stem]
    parts += [] if step is None else [f"step-{step}"]
    parts += loaded.tags
    parts += [] if config.data.dir is None else [Path(config.data.dir).resolve().name]
    parts += [] if config.evaluate.streams is None else [f"streams-{loaded.streams}"]
    parts += [] if config.evaluate.max_tokens is None else [f"first-{config.evaluate.max_tokens}"]
    parts += [] if config.splits == ["valid", "test"] else config.splits
    name = "-".join(["evaluation", *(re.sub(r"[^\w.-]", "_", part)[:60] for part in parts)])
    return loaded.folder / f"{name}.json"


def holds(path: Path, report: dict[str, Any]) -> bool:
    """Whether a file holds the same results, ignoring speed and digits that can vary with the batch size."""

    def comparable(content: dict[str, Any]) -> Any:
        content = {**content, "splits": {s: {**r, "tokens_per_second": None} for s, r in content["splits"].items()}}
        return map_leaves(lambda leaf: float(f"{leaf:.5g}") if isinstance(leaf, float) else leaf, content)

    try:
        return bool(comparable(json.loads(path.read_bytes())) == comparable(json_ready(report)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
