"""The evaluation command: every split's perplexity as a table and as JSON, or what another mode asks for."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lm.config.commands import EvaluateConfig, Mode, TrainConfig
from lm.data import encode_folder, open_corpus
from lm.data.text.extent import Extent, SplitText
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
    """What the mode asks for."""
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
    """Score the splits asked for, print tables, write JSON."""
    figures: dict[str, dict[str, Any]] = {}
    for name, text in read_splits(config, run, vocabulary, content=content).items():
        with explain_scoring_oom(run, vocabulary, model.embedding.weight.device):
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
        assert result is not None, "nobody asked to stop"
        figures[name] = as_figures(result, vocabulary, extent=text.extent)
    say(as_table(figures))
    say("\n" + groups_table({name: f["by_frequency"] + f["by_cluster"] for name, f in figures.items()}))
    step = content["progress"]["step"]
    target = Path(config.json) if config.json else default_target(file, config.data.dir)
    report = {"checkpoint": str(file), "step": step, "data_dir": config.data.dir, "splits": figures}
    try:
        write_json(target, report)
    except OSError as error:
        raise UserError(f"json={target} cannot be written: {error.strerror}. Try json=PATH with another.") from None
    say(f"\nStep {step} of {file}; written to {target}")


def read_splits(
    config: EvaluateConfig, run: TrainConfig, vocabulary: Vocabulary, *, content: dict[str, Any]
) -> dict[str, SplitText]:
    """What to score: of the run's own corpus, or of another folder by the run's rules."""
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
    """What the JSON holds of a split."""
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


def as_table(figures: dict[str, dict[str, Any]]) -> str:
    rows = [
        [
            name,
            f"{f['perplexity']:.2f}",
            f"{f['perplexity_per_word']:.2f}",
            f"{f['perplexity_without_unk']:.2f}",
            f"{f['bits_per_character']:.3f}",
            f"{f['unigram_perplexity']:.2f}",
            f"{f['oov_rate']:.2%}",
            f"{f['tokens']:,}",
            f"{f['streams']}",
            f"{f['tokens_per_second']:,.0f}",
        ]
        for name, f in figures.items()
    ]
    header = ["split", "perplexity", "per word", "without <unk>", "bits/char", "unigram", "OOV", "tokens"]
    header += ["streams", "tokens/s"]
    return table(rows, header=header)


def default_target(file: Path, other_text: str | None) -> Path:
    """evaluation.json in the run directory or beside a lone checkpoint; another text's figures under its own name."""
    if other_text is None:
        return home(file) / "evaluation.json"
    name = re.sub(r"[^\w.-]", "_", Path(other_text).resolve().name)
    return home(file) / f"evaluation-{name}.json"


def home(file: Path) -> Path:
    """The run directory of a checkpoint, or the folder of a lone one."""
    return file.parent.parent if file.parent.name == "checkpoints" else file.parent
