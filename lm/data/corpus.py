"""A prepared corpus: token ids on disk, memory-mapped, with its vocabulary and a record of how it was made.

    train.bin valid.bin test.bin    ids, raw little-endian uint16, or uint32 for a large vocabulary
    vocab.tsv                       per line a word, a tab and its training count, in the order of the ids
    sentencepiece.model words.txt   for subwords: the model, and the word vocabulary of the same text
    train.words.bin ...             for subwords: a byte per token (`subwords.KNOWN`, `WORD_END`)
    meta.json                       source, rule, sizes and hashes

`lm.data.prepare` writes such folders; a folder under its final name is always complete.
"""

import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lm.data.download import file_sha256
from lm.data.source import SPLITS
from lm.data.text.subwords import WORD_END, SubwordVocabulary, open_vocabulary
from lm.data.text.vocabulary import Ids, Vocabulary
from lm.system.console import byte_size, table
from lm.system.errors import UserError

FORMAT = 2
"""Incremented when the folder's format, or the words that a rule gives, change."""


class Extent(NamedTuple):
    """The size of a text; converts its perplexity per token to units that do not depend on the tokenizer."""

    tokens: int
    words: int
    """Words and `</s>`: the tokens, unless these are subwords."""
    characters: int
    """Of the raw text, including spaces and line ends."""

    def per_word(self, perplexity: float) -> float:
        try:
            return math.pow(perplexity, self.tokens / self.words)
        except OverflowError:
            return math.inf

    def bits_per_character(self, perplexity: float) -> float:
        return self.tokens * math.log2(perplexity) / self.characters


@dataclass(frozen=True)
class SplitText:
    """A text to score."""

    tokens: Ids
    characters: int
    marks: npt.NDArray[np.uint8] | None
    """For subwords: `subwords.KNOWN` and `WORD_END` of each token."""

    @property
    def extent(self) -> Extent:
        words = len(self.tokens) if self.marks is None else int(np.count_nonzero(self.marks & WORD_END))
        return Extent(len(self.tokens), words, self.characters)


@dataclass(frozen=True, eq=False)
class Corpus:
    """A folder of token ids, opened and checked."""

    path: Path
    meta: dict[str, Any]
    vocabulary: Vocabulary
    unchecked: set[str] = field(default_factory=set)
    """Token files whose checksums are compared when they are first used."""

    @classmethod
    def open(cls, path: Path, *, verify: bool = True) -> "Corpus":
        """Check meta.json, vocabulary and sizes; with `verify`, also the tokens of a split when they are first used."""
        try:
            meta = json.loads((path / "meta.json").read_bytes())
            if meta["format"] != FORMAT or meta["checksum"] != checksum(meta):
                raise ValueError
            hashes = meta.get("vocabulary_files", {}) | {"vocab.tsv": meta["vocabulary_hash"]}
            files = {name: (path / name).read_bytes() for name in hashes}
            for name, data in files.items():
                if hashlib.sha256(data).hexdigest() != hashes[name]:
                    raise _unsound(path, f"{name} has changed since it was prepared")
            for split, record in meta["splits"].items():
                _check_size(path / f"{split}.bin", expected=record["tokens"] * np.dtype(meta["dtype"]).itemsize)
                if "marks_sha256" in record:
                    _check_size(path / f"{split}.words.bin", expected=record["tokens"])
        except OSError as error:
            name = Path(str(error.filename)).name
            raise _unsound(path, f"{name} cannot be read ({error.strerror})") from None
        except (KeyError, TypeError, ValueError, AttributeError):
            raise _unsound(path, f"meta.json is not an undamaged file of format {FORMAT}") from None
        unchecked = {f"{split}{ending}" for split in SPLITS for ending in (".bin", ".words.bin")} if verify else set()
        return cls(path, meta, open_vocabulary(files), unchecked)

    @property
    def name(self) -> str:
        return str(self.meta["name"])

    def split(self, name: str) -> npt.NDArray[np.unsignedinteger[Any]]:
        """The ids of train, valid or test, memory-mapped."""
        self._check_sum(f"{name}.bin", self.meta["splits"][name].get("sha256"))
        return np.memmap(self.path / f"{name}.bin", np.dtype(self.meta["dtype"]).newbyteorder("<"), mode="r")

    def text(self, name: str) -> SplitText:
        """A split with all that scoring needs."""
        marks = None
        if isinstance(self.vocabulary, SubwordVocabulary):
            self._check_sum(f"{name}.words.bin", self.meta["splits"][name].get("marks_sha256"))
            marks = np.memmap(self.path / f"{name}.words.bin", np.uint8, mode="r")
        return SplitText(self.split(name), self.extent(name).characters, marks)

    def _check_sum(self, name: str, expected: str | None) -> None:
        """Compare a token file with its checksum, once."""
        if name not in self.unchecked or expected is None:  # older corpora have no checksum of the marks
            return
        if file_sha256(self.path / name, label=f"checking {name}", to=sys.stderr) != expected:
            raise _unsound(self.path, f"the checksum of {name} is wrong: it has changed since it was prepared")
        self.unchecked.discard(name)

    def extent(self, name: str) -> Extent:
        record = self.meta["splits"][name]
        return Extent(record["tokens"], record.get("word_tokens", record["tokens"]), record["characters"])

    def in_other_units(self, split: str, perplexities: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """Perplexities of a split per word, and their bits per character, for a summary."""
        extent = self.extent(split)
        return {
            f"{split}_per_word": {name: extent.per_word(value) for name, value in perplexities.items()},
            f"{split}_bits_per_character": {
                name: extent.bits_per_character(value) for name, value in perplexities.items()
            },
        }

    def hashes(self) -> dict[str, str]:
        """Hashes of the vocabulary and of every split, by which a checkpoint recognizes its corpus."""
        splits = {split: str(self.meta["splits"][split]["sha256"]) for split in SPLITS}
        return {"vocabulary": self.vocabulary.hash, **splits}

    def check_unchanged(self, content: dict[str, Any], *, splits: Sequence[str]) -> None:
        """Refuse a checkpoint that was trained on other text."""
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
        """The split's perplexity under the unigram distribution of the training text."""
        return float(self.meta["splits"][split]["unigram_perplexity"])

    @property
    def true_perplexity(self) -> float | None:
        """The lowest perplexity any model can reach, if the source is synthetic."""
        value = self.meta.get("true_perplexity")
        return None if value is None else float(value)


def summary(meta: Mapping[str, Any], *, vocabulary: Vocabulary) -> str:
    """What a corpus was made of and how, in a few lines: source, checksum, rule, vocabulary and splits."""
    archive = meta.get("archive", {})
    facts = {"source": meta["source"]} | {key: archive[key] for key in ("path", "url", "sha256") if key in archive}
    if "size" in archive:
        facts["size"] = f"{archive['size']:,} bytes ({byte_size(archive['size'])})"
    facts |= {
        key: ("yes" if value else "no") if isinstance(value, bool) else value for key, value in meta["rule"].items()
    }
    unknown, ends = (int(vocabulary.counts[number]) for number in (vocabulary.unk_id, vocabulary.eos_id))
    pieces = isinstance(vocabulary, SubwordVocabulary)
    facts["vocabulary"] = (
        f"{len(vocabulary):,} {'pieces' if pieces else 'words'}, among them <unk> ({unknown:,} times in training) "
        f"and </s> ({ends:,})"
    )
    if not pieces and (unseen := int((vocabulary.counts == 0).sum()) - (not unknown) - (not ends)):
        facts["vocabulary"] += f"; {unseen:,} of the given words never occur there"
    width = max(map(len, facts))
    lines = [f"{key.ljust(width)}  {value}" for key, value in facts.items()]
    rows = [
        [split, f"{f['tokens']:,}", f"{f['words']:,}", f"{f['characters']:,}", f"{f['oov'] / f['tokens']:.2%}"]
        + ([f"{1 - f['known_word_tokens'] / f['word_tokens']:.2%}"] if pieces else [])
        for split, f in meta["splits"].items()
    ]
    header = ["split", "tokens", "words", "characters", "<unk>", *(["rare words"] if pieces else [])]
    return "\n".join([*lines, "", table(rows, header=header)])


def _check_size(path: Path, *, expected: int) -> None:
    size = path.stat().st_size
    if size != expected:
        raise _unsound(path.parent, f"{path.name} has {size} bytes instead of {expected}")


def checksum(meta: Mapping[str, Any]) -> str:
    """sha256 of what meta.json says, however it is laid out."""
    records = {key: value for key, value in meta.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()


def _unsound(path: Path, reason: str) -> UserError:
    return UserError(
        f"{str(path)!r} must be a corpus prepared by this version, but {reason}. Move that folder away and run "
        "again to prepare it; or prepare it elsewhere with data.root=PATH"
    )
