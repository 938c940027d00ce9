"""The evaluation command: every split's perplexity as a table and as JSON."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from lm import checkpoint
from lm.building import pick_device, restore
from lm.config import Config, EvaluateCommandConfig
from lm.console import say, table
from lm.data import encode_folder, open_corpus
from lm.data.corpus import SPLITS
from lm.data.vocabulary import Ids, Vocabulary
from lm.errors import UserError
from lm.files import write_whole
from lm.scoring import score


def evaluate(config: EvaluateCommandConfig) -> None:
    """Score the splits asked for, print a table, write JSON."""
    if config.checkpoint is None:
        raise UserError(
            "checkpoint must name a run directory or a checkpoint file; got nothing. Try checkpoint=runs/NAME"
        )
    file = checkpoint.find(config.checkpoint)
    content = checkpoint.load(file)
    model, vocabulary, run = restore(content, path=file, device=pick_device(config.device))
    splits = read_splits(config, run, vocabulary)
    figures: dict[str, dict[str, Any]] = {}
    for name, tokens in splits.items():
        result = score(
            model,
            tokens,
            streams=config.evaluate.streams,
            batch_size=config.evaluate.batch_size,
            eos_id=vocabulary.eos_id,
            unk_id=vocabulary.unk_id,
            label=name,
        )
        assert result is not None, "nobody asked to stop"
        counts = np.bincount(tokens, minlength=len(vocabulary))
        figures[name] = {**result.as_dict(), "unigram_perplexity": vocabulary.unigram_perplexity(counts)}
    target = Path(config.json) if config.json else default_target(file)
    report = {
        "checkpoint": str(file),
        "step": content["standing"]["step"],
        "data_dir": config.data.dir,
        "splits": figures,
    }
    write_json(report, target)
    say(as_table(figures))
    say(f"\nStep {report['step']} of {file}; written to {target}.")


def read_splits(config: EvaluateCommandConfig, run: Config, vocabulary: Vocabulary) -> dict[str, Ids]:
    """The token ids to score: of the run's own corpus, or of another folder by the run's rules."""
    unknown = [name for name in config.splits if name not in SPLITS]
    if unknown or not config.splits:
        raise UserError(f"splits must be a list of {', '.join(SPLITS)}; got {config.splits}. Try splits=[valid,test]")
    if config.data.dir is not None:
        found = encode_folder(config.data.dir, data_config=run.data, vocabulary=vocabulary)
        return {name: found[name] for name in config.splits if name in found} or found
    corpus = open_corpus(run.data, notice=say)
    if corpus.vocabulary.hash != vocabulary.hash:
        raise UserError(
            f"The vocabulary of {corpus.path} is not the one the checkpoint was trained with: the corpus has changed "
            "since. Restore it, or score a folder of text with data.dir=PATH."
        )
    return {name: corpus.split(name) for name in config.splits}


def as_table(figures: dict[str, dict[str, Any]]) -> str:
    rows = [
        [
            name,
            f"{f['perplexity']:.2f}",
            f"{f['perplexity_without_unk']:.2f}",
            f"{f['unigram_perplexity']:.2f}",
            f"{f['oov_rate']:.2%}",
            f"{f['tokens']:,}",
            f"{f['streams']}",
            f"{f['tokens_per_second']:,.0f}",
        ]
        for name, f in figures.items()
    ]
    header = ["split", "perplexity", "without <unk>", "unigram", "OOV", "tokens", "streams", "tokens/s"]
    return table(rows, header=header)


def default_target(file: Path) -> Path:
    """evaluation.json in the run directory, or beside a checkpoint that stands alone."""
    folder = file.parent.parent if file.parent.name == "checkpoints" else file.parent
    return folder / "evaluation.json"


def write_json(report: dict[str, Any], target: Path) -> None:
    try:
        write_whole(target, lambda stream: stream.write(json.dumps(report, indent=2).encode() + b"\n"))
    except OSError as error:
        raise UserError(f"json={target} cannot be written: {error.strerror}. Try json=PATH with another.") from None
