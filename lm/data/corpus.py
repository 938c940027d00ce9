"""A prepared corpus: token ids on disk, memory-mapped, with its vocabulary and a record of how it was made.

    train.bin valid.bin test.bin    ids, raw little-endian uint16, or uint32 where the vocabulary needs it
    vocab.tsv                       a word, a tab and its training count a line, in the order of the ids
    sentencepiece.model words.txt   where the words are cut into pieces: the model, and the words that a vocabulary of
                                    words would hold
    train.words.bin ...             and a byte for each piece that says whose it is (`subwords.KNOWN`, `WORD_END`)
    meta.json                       source, rule, sizes and hashes

`lm.data.write` writes such folders; a folder under its final name is always whole.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lm.data.text.extent import Extent, SplitText
from lm.data.text.subwords import MODEL_FILE, WORDS_FILE, SubwordVocabulary, open_vocabulary
from lm.data.text.vocabulary import Vocabulary
from lm.system.errors import UserError

SPLITS = ("train", "valid", "test")
FORMAT = 2
"""Raised when the folder's form, or the words that a rule gives, change."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """A folder of token ids, opened and found sound."""

    path: Path
    meta: dict[str, Any]
    vocabulary: Vocabulary

    @classmethod
    def open(cls, path: Path) -> "Corpus":
        """Check sizes and the vocabulary's hash; the token files' own hashes would mean reading them all."""
        meta = _read_meta(path)
        try:
            words = (path / "vocab.tsv").read_bytes()
            if hashlib.sha256(words).hexdigest() != meta["vocabulary_hash"]:
                raise _unsound(path, "vocab.tsv is not the vocabulary that meta.json names")
            files = {"vocab.tsv": words, **_read_model(path, meta)}
            for split in SPLITS:
                tokens = int(meta["splits"][split]["tokens"])
                _check_size(path, f"{split}.bin", expected=tokens * np.dtype(meta["dtype"]).itemsize)
                if len(files) > 1:
                    _check_size(path, f"{split}.words.bin", expected=tokens)
        except OSError as error:
            name = Path(str(error.filename)).name
            raise _unsound(path, f"{name} cannot be read ({error.strerror})") from None
        except (KeyError, TypeError, ValueError):
            raise _unsound(path, "meta.json lacks what this version writes there") from None
        return cls(path, meta, open_vocabulary(files))

    @property
    def name(self) -> str:
        return str(self.meta["name"])

    def split(self, name: str) -> npt.NDArray[np.unsignedinteger[Any]]:
        """The ids of train, valid or test, read from disk as they are used."""
        return self._maps[name]

    @cached_property
    def _maps(self) -> dict[str, npt.NDArray[np.unsignedinteger[Any]]]:
        dtype = np.dtype(self.meta["dtype"]).newbyteorder("<")
        return {split: np.memmap(self.path / f"{split}.bin", dtype, mode="r") for split in SPLITS}

    def text(self, name: str) -> SplitText:
        """A split and what its perplexity can be told by."""
        marks = None
        if isinstance(self.vocabulary, SubwordVocabulary):
            marks = np.memmap(self.path / f"{name}.words.bin", np.uint8, mode="r")
        return SplitText(self.split(name), self.extent(name).characters, marks)

    def extent(self, name: str) -> Extent:
        record = self.meta["splits"][name]
        return Extent(record["tokens"], record.get("word_tokens", record["tokens"]), record["characters"])

    def hashes(self) -> dict[str, str]:
        """What a checkpoint remembers of the text it was made from: the hash of every split's ids, and of the words."""
        splits = {split: str(self.meta["splits"][split]["sha256"]) for split in SPLITS}
        return {"vocabulary": self.vocabulary.hash, **splits}

    def check_unchanged(self, content: dict[str, Any], *, splits: Sequence[str]) -> None:
        """Refuse to go on with a checkpoint that was made from other text."""
        own, remembered = self.hashes(), content["corpus"]
        changed = [part for part in ("vocabulary", *splits) if own[part] != remembered.get(part)]
        if changed:
            raise UserError(
                f"{str(self.path)!r} is not what the checkpoint was trained with: the corpus has changed since "
                f"({', '.join(changed)}). Restore it; or train a new run, or score a folder of text with data.dir=PATH"
            )

    def shard_ends(self, split: str) -> list[int]:
        """The tokens at which the split's shards end."""
        ends = self.meta["splits"][split].get("shard_ends")
        if not isinstance(ends, list) or not ends or ends[-1] != len(self.split(split)):
            raise _unsound(self.path, f"meta.json does not say where the shards of {split}.bin end")
        return ends

    def unigram_perplexity(self, split: str) -> float:
        """The split's perplexity for a model that knows only how frequent the words of training are."""
        return float(self.meta["splits"][split]["unigram_perplexity"])

    @property
    def true_perplexity(self) -> float | None:
        """The least perplexity any model can reach, where the source is one we made."""
        value = self.meta.get("true_perplexity")
        return None if value is None else float(value)


def _read_model(path: Path, meta: dict[str, Any]) -> dict[str, bytes]:
    """What a corpus of pieces holds besides their list; nothing where it is of words."""
    hashes = meta.get("vocabulary_files", {})
    files = {name: (path / name).read_bytes() for name in (MODEL_FILE, WORDS_FILE) if name in hashes}
    for name, data in files.items():
        if hashlib.sha256(data).hexdigest() != hashes[name]:
            raise _unsound(path, f"{name} is not the one that meta.json names")
    return files


def _check_size(path: Path, name: str, *, expected: int) -> None:
    size = (path / name).stat().st_size
    if size != expected or size == 0:
        raise _unsound(path, f"{name} has {size} bytes where meta.json says {expected}")


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads((path / "meta.json").read_bytes())
    except OSError as error:
        raise _unsound(path, f"meta.json cannot be read ({error.strerror})") from None
    except ValueError:
        raise _unsound(path, "meta.json is not JSON") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise _unsound(path, f"meta.json is not of format {FORMAT}")
    return meta


def _unsound(path: Path, reason: str) -> UserError:
    return UserError(
        f"{str(path)!r} must be a corpus prepared by this version, but {reason}. Move that folder away and run "
        "again: it is then prepared anew; or prepare elsewhere with data.root=PATH"
    )
