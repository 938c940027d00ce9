"""The evaluation command: every split's perplexity as a table and as JSON."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lm import checkpoint
from lm.building import pick_device, restore
from lm.config import Config, EvaluateCommandConfig
from lm.console import say, table
from lm.data import encode_folder, open_corpus
from lm.data.vocabulary import Ids, Vocabulary
from lm.errors import UserError
from lm.files import write_json
from lm.processor import prepare_processor
from lm.scoring import score


def evaluate(config: EvaluateCommandConfig) -> None:
    """Score the splits asked for, print a table, write JSON."""
    assert config.checkpoint is not None
    prepare_processor(torch.get_num_threads())
    file = checkpoint.find(config.checkpoint)
    content = checkpoint.load(file)
    model, vocabulary, run = restore(content, path=file, device=pick_device(config.device, key="device"))
    figures: dict[str, dict[str, Any]] = {}
    for name, tokens in read_splits(config, run, vocabulary, content=content).items():
        result = score(
            model,
            tokens,
            streams=config.evaluate.streams or run.evaluate.streams,
            batch_size=config.evaluate.batch_size,
            eos_id=vocabulary.eos_id,
            unk_id=vocabulary.unk_id,
            label=name,
        )
        assert result is not None, "nobody asked to stop"
        counts = np.bincount(tokens, minlength=len(vocabulary))
        figures[name] = {**result.as_dict(), "unigram_perplexity": vocabulary.unigram_perplexity(counts)}
    say(as_table(figures))
    step = content["standing"]["step"]
    target = Path(config.json) if config.json else default_target(file, config.data.dir)
    report = {"checkpoint": str(file), "step": step, "data_dir": config.data.dir, "splits": figures}
    try:
        write_json(target, report)
    except OSError as error:
        raise UserError(f"json={target} cannot be written: {error.strerror}. Try json=PATH with another.") from None
    say(f"\nStep {step} of {file}; written to {target}")


def read_splits(
    config: EvaluateCommandConfig, run: Config, vocabulary: Vocabulary, *, content: dict[str, Any]
) -> dict[str, Ids]:
    """The token ids to score: of the run's own corpus, or of another folder by the run's rules."""
    if config.data.dir is not None:
        return encode_folder(config.data.dir, data_config=run.data, vocabulary=vocabulary, splits=config.splits)
    corpus = open_corpus(run.data, notice=say)
    corpus.check_unchanged(content, splits=config.splits)
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


def default_target(file: Path, other_text: str | None) -> Path:
    """evaluation.json in the run directory or beside a lone checkpoint; another text's figures under its own name."""
    folder = file.parent.parent if file.parent.name == "checkpoints" else file.parent
    if other_text is None:
        return folder / "evaluation.json"
    name = re.sub(r"[^\w.-]", "_", Path(other_text).resolve().name)
    return folder / f"evaluation-{name}.json"
