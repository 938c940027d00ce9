"""Open a corpus, or another folder of text with a corpus's rule and vocabulary."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from lm.config.groups import DEFAULT_ROOT, DataConfig
from lm.config.registry import find_plugin
from lm.data.corpora.text import find_in_folder, text_parts
from lm.data.corpus import SPLITS, Corpus, SplitText
from lm.data.encode import encode_text
from lm.data.settings import CorpusConfig, TokenizedConfig, rule_of
from lm.data.text.reading import Text
from lm.data.text.vocabulary import Vocabulary
from lm.data.write import Block, Recipe, write_corpus
from lm.system.errors import UserError


def open_corpus(
    config: DataConfig, *, notice: Callable[[str], None] = print, verify: bool = True, trusted: bool = True
) -> Corpus:
    """The corpus of these settings, prepared under `data.root` on first use; `notice` reports the preparation.

    `verify` compares the tokens with their checksums. Settings that are not `trusted` come from a checkpoint, which
    must not decide where to write, nor what to fetch.
    """
    assert isinstance(config, CorpusConfig)
    recipe: Recipe = find_plugin("data", config.name).target(config)
    if isinstance(config, TokenizedConfig) and (limits := config.limits()):
        recipe = _extended(recipe, *limits, words=", ".join(limits.values()))
    if (pieces := config.num_pieces) is not None:
        recipe = _extended(recipe, f"sp{pieces}", tokenizer=f"SentencePiece, unigram: {pieces} pieces of the words")
    path = Path(config.root) / recipe.folder
    if not path.exists():
        if not trusted and (config.root != DEFAULT_ROOT or getattr(config, "url", None) is not None):
            raise UserError(
                f"The checkpoint's corpus is not prepared at {str(path)!r}, and a checkpoint does not decide where to "
                f"write or what to fetch. Prepare it with python -m lm.prepare data={config.name} "
                f"data.root={config.root} and the run's other data settings, which are in its config.yaml"
            )
        write_corpus(path, recipe=recipe, notice=notice)
    return Corpus.open(path, verify=verify)


def _extended(recipe: Recipe, *suffixes: str, **rule: str) -> Recipe:
    """The recipe with more of a rule, which the folder's name tells, too."""
    meta = recipe.meta | {"rule": recipe.meta["rule"] | rule}
    return replace(recipe, folder="-".join([recipe.folder, *suffixes]), meta=meta)


def encode_folder(
    folder: str,
    *,
    data_config: DataConfig,
    vocabulary: Vocabulary,
    splits: Sequence[str] = SPLITS,
    encoding_errors: str = "strict",
) -> dict[str, SplitText]:
    """The requested splits that the folder holds, encoded with a run's own rule and vocabulary."""
    files = {split: paths for split, paths in find_in_folder(folder).items() if split in splits}
    if not files:
        raise UserError(
            f"data.dir must hold at least one of {', '.join(f'{split}.txt' for split in splits)}; {folder!r} holds "
            "none. Put the text to evaluate there as test.txt"
        )
    text = Text(text_parts(files), rule_of(data_config), errors=encoding_errors)
    with TemporaryDirectory() as scratch:
        encoded = encode_text(text, vocabulary=vocabulary, scratch=Path(scratch))
        return {split: _join(list(blocks)) for split, blocks in encoded.items()}


def _join(blocks: Sequence[Block]) -> SplitText:
    marks = [block.marks for block in blocks if block.marks is not None]
    return SplitText(
        np.concatenate([block.ids for block in blocks]),
        sum(block.characters for block in blocks),
        np.concatenate(marks) if marks else None,
    )
