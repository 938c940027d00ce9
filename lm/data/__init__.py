"""Text to token ids on disk, and from there to batches.

    corpus = open_corpus(config.data)        # prepares it on first use
    corpus.split("train")                    # ids, memory-mapped
    corpus.vocabulary.decode(ids)

One file per source (`pydoc`, `zipf`, `text`, ...) says where the text comes from; `encode` turns any text into ids
(large ones by `scan`), and `write` puts them into the folder that `corpus` opens.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from lm.config.data import (
    DataConfig,
    EuroparlConfig,
    OneBillionWordConfig,
    PydocConfig,
    Text8Config,
    TextConfig,
    TokenizedConfig,
    ZipfConfig,
)
from lm.data.corpora import europarl, one_billion_word, pydoc, text, text8, zipf
from lm.data.corpus import SPLITS, Corpus
from lm.data.encode import encode_text
from lm.data.text.extent import SplitText
from lm.data.text.reading import Text
from lm.data.text.tokenize import rule_of
from lm.data.text.vocabulary import EOS, UNK, Vocabulary
from lm.data.write import Block, Recipe, write_corpus
from lm.system.errors import UserError

__all__ = ["EOS", "SPLITS", "UNK", "Corpus", "Vocabulary", "encode_folder", "open_corpus"]


def open_corpus(config: DataConfig, *, notice: Callable[[str], None] = print) -> Corpus:
    """The corpus that `config` names; prepared under `data.root` on first use, which `notice` is told."""
    recipe = _recipe(config)
    if isinstance(config, TokenizedConfig) and config.pieces is not None:
        recipe = _of_pieces(recipe, config.pieces)
    path = Path(config.root) / recipe.folder
    if not path.exists():
        write_corpus(path, recipe=recipe, notice=notice)
    return Corpus.open(path)


def _of_pieces(recipe: Recipe, pieces: int) -> Recipe:
    """The recipe's corpus beside that of its words."""
    rule = recipe.meta["rule"] | {"tokenizer": f"SentencePiece, unigram: {pieces} pieces of the words"}
    return replace(recipe, folder=f"{recipe.folder}-sp{pieces}", meta=recipe.meta | {"rule": rule})


def _recipe(config: DataConfig) -> Recipe:
    match config:
        case PydocConfig():
            return pydoc.recipe(config)
        case ZipfConfig():
            return zipf.recipe(config)
        case TextConfig():
            return text.recipe(config)
        case Text8Config():
            return text8.recipe(config)
        case EuroparlConfig():
            return europarl.recipe(config)
        case OneBillionWordConfig():
            return one_billion_word.recipe(config)
    raise AssertionError(f"no source for {type(config).__name__}")


def encode_folder(
    folder: str,
    *,
    data_config: DataConfig | dict[str, object],
    vocabulary: Vocabulary,
    splits: Sequence[str] = SPLITS,
    encoding_errors: str = "strict",
) -> dict[str, SplitText]:
    """Those of the splits that another folder holds, read by a run's own rule and with its vocabulary."""
    files = {split: paths for split, paths in text.find_in_folder(folder).items() if split in splits}
    if not files:
        raise UserError(
            f"data.dir must hold at least one of {', '.join(f'{split}.txt' for split in splits)}; {folder!r} holds "
            "none. Put the text to evaluate there as test.txt"
        )
    other = Text(text.text_parts(files), rule_of(data_config), errors=encoding_errors)
    with TemporaryDirectory() as scratch:
        encoded = encode_text(other, vocabulary=vocabulary, scratch=Path(scratch))
        return {split: _together(list(blocks)) for split, blocks in encoded.items()}


def _together(blocks: Sequence[Block]) -> SplitText:
    marks = [block.marks for block in blocks if block.marks is not None]
    return SplitText(
        np.concatenate([block.ids for block in blocks]),
        sum(block.characters for block in blocks),
        np.concatenate(marks) if marks else None,
    )
