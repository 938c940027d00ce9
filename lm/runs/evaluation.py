"""`evaluate.py`: perplexities as a table and as JSON, or one of the other modes."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lm.config.commands import EvaluateConfig, Mode, TrainConfig
from lm.data.corpus import Extent, SplitText
from lm.data.opening import encode_folder, open_corpus
from lm.data.text.vocabulary import Vocabulary
from lm.inference.line_modes import print_next_words, score_lines
from lm.inference.projector import show_words
from lm.inference.scoring import Score, score
from lm.inference.word_groups import by_cluster, by_frequency, groups_table
from lm.model.language_model import LanguageModel
from lm.runs.assembly import restore
from lm.runs.shortage import explain_oom, explain_scoring_oom
from lm.system.arithmetic import exact_products
from lm.system.console import say, table
from lm.system.devices import pick_device
from lm.system.errors import UserError
from lm.system.files import write_json
from lm.system.memory import size_of
from lm.system.processor import prepare_processor
from lm.training import checkpoint


def evaluate(config: EvaluateConfig) -> None:
    assert config.checkpoint is not None
    prepare_processor(torch.get_num_threads())
    exact_products()
    file = checkpoint.find(config.checkpoint)
    content = checkpoint.load(file)
    device = pick_device(config.device, key="device")
    size = sum(weight.numel() * weight.element_size() for weight in content["model"].values())
    with explain_oom(device, doing="loading the model", advice=lambda: f"It needs {size_of(2 * size)}."):
        model, vocabulary, run = restore(content, path=file, device=device)
    run = replace(run, evaluate=replace(run.evaluate, batch_size=config.evaluate.batch_size))
    match config.mode:
        case Mode.perplexity:
            score_splits(config, model, vocabulary, run=run, file=file, content=content)
        case Mode.score:
            score_lines(config, model, vocabulary, run=run)
        case Mode.topk:
            print_next_words(config, model, vocabulary, run=run)
        case Mode.projector:
            show_words(model, vocabulary, num_words=config.words, folder=home(file))


def score_splits(
    config: EvaluateConfig,
    model: LanguageModel,
    vocabulary: Vocabulary,
    *,
    run: TrainConfig,
    file: Path,
    content: dict[str, Any],
) -> None:
    """Score the splits, print tables, write JSON."""
    figures: dict[str, dict[str, Any]] = {}
    for name, text in read_splits(config, run, vocabulary, content=content).items():
        with explain_scoring_oom(run, vocabulary, model.device):
            result = score(
                model,
                text.tokens,
                marks=text.marks,
                streams=config.evaluate.streams or run.evaluate.streams,
                batch_size=run.evaluate.batch_size,
                eos_id=vocabulary.eos_id,
                unk_id=vocabulary.unk_id,
                label=name,
            )
        assert result is not None, "without `stop` it is never stopped"
        figures[name] = as_figures(result, vocabulary, extent=text.extent)
    say(as_table(figures))
    say("\n" + groups_table({name: f["by_frequency"] + f["by_cluster"] for name, f in figures.items()}))
    step = content["progress"]["step"]
    target = Path(config.json) if config.json else default_target(file, config.data.dir)
    report = {"checkpoint": str(file), "step": step, "data_dir": config.data.dir, "splits": figures}
    try:
        write_json(target, report)
    except OSError as error:
        raise UserError(f"json={target} cannot be written: {error.strerror}. Try another json=PATH.") from None
    say(f"\nStep {step} of {file}; written to {target}")


def read_splits(
    config: EvaluateConfig, run: TrainConfig, vocabulary: Vocabulary, *, content: dict[str, Any]
) -> dict[str, SplitText]:
    """The splits of the run's own corpus, or those of another folder with the run's tokenizer."""
    if config.data.dir is not None:
        return encode_folder(
            config.data.dir,
            data_config=run.data,
            vocabulary=vocabulary,
            splits=config.splits,
            encoding_errors=config.data.encoding_errors.value,
        )
    corpus = open_corpus(run.data, notice=say)
    corpus.check_unchanged(content, splits=config.splits)
    return {name: corpus.text(name) for name in config.splits}


def as_figures(result: Score, vocabulary: Vocabulary, *, extent: Extent) -> dict[str, Any]:
    """The JSON of a split."""
    frequency, clusters = by_frequency(vocabulary.counts), by_cluster(result.cutoffs, vocab_size=len(vocabulary))
    return {
        **result.as_dict(),
        "words": extent.words,
        "perplexity_per_word": extent.per_word(result.perplexity),
        "bits_per_character": extent.bits_per_character(result.perplexity),
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


def default_target(file: Path, other_text: str | None) -> Path:
    """evaluation.json in the run directory or beside a lone checkpoint; with the folder's name for another text."""
    if other_text is None:
        return home(file) / "evaluation.json"
    name = re.sub(r"[^\w.-]", "_", Path(other_text).resolve().name)
    return home(file) / f"evaluation-{name}.json"


def home(file: Path) -> Path:
    """The run directory of a checkpoint, or the folder of a lone checkpoint."""
    return file.parent.parent if file.parent.name == "checkpoints" else file.parent
