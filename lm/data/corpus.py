"""A prepared corpus: memory-mapped token ids with their vocabulary and metadata.

    train.bin valid.bin test.bin    ids, raw little-endian uint16, or uint32 for a large vocabulary
    vocab.tsv                       per line a word, a tab and its training count, in the order of the ids
    sentencepiece.model words.txt   for subwords: the model, and the word vocabulary of the same text
    train.words.bin ...             for subwords: a byte per token (`KNOWN`, `WORD_END`)
    meta.json                       source, tokenization, sizes and hashes

`lm.data.prepare` writes these folders; a folder under its final name is always complete.
"""

import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lm.config.groups import DEFAULT_ROOT, DataConfig, find_plugin
from lm.data.archive import file_hash
from lm.data.source import SPLITS, Source
from lm.data.text.vocabulary import Ids, SubwordVocabulary, Vocabulary, open_vocabulary
from lm.system.console import byte_size, own_command, table
from lm.system.errors import UserError

FORMAT = 2
"""Increment when the folder's format or a tokenizer's output changes."""


@dataclass(frozen=True)
class SplitText:
    """A tokenized split that converts perplexity per token to tokenizer-independent units."""

    tokens: Ids
    num_words: int
    """Words and `</s>`; equals the number of tokens, except for subwords."""
    num_characters: int
    """Characters of the raw text, including spaces and line ends."""
    marks: npt.NDArray[np.uint8] | None = None
    """For subwords: `KNOWN` and `WORD_END` of each token."""

    def first(self, max_tokens: int | None) -> "SplitText":
        """Return the first tokens, with words and characters in proportion."""
        if max_tokens is None or max_tokens >= len(self.tokens):
            return self
        share, marks = max_tokens / len(self.tokens), None if self.marks is None else self.marks[:max_tokens]
        words, characters = (max(1, round(n * share)) for n in (self.num_words, self.num_characters))
        return SplitText(self.tokens[:max_tokens], words, characters, marks)

    def per_word(self, perplexity: float) -> float:
        try:
            return math.pow(perplexity, len(self.tokens) / self.num_words)
        except OverflowError:
            return math.inf

    def bits_per_character(self, perplexity: float) -> float:
        return len(self.tokens) * math.log2(perplexity) / self.num_characters


@dataclass(frozen=True, eq=False)
class Corpus:
    """A prepared corpus, opened and checked."""

    path: Path
    meta: dict[str, Any]
    vocabulary: Vocabulary
    unchecked: set[str] = field(default_factory=set)
    """Token files whose checksums are compared on first use."""

    @classmethod
    def open(cls, path: Path, *, verify: bool = True) -> "Corpus":
        """Check meta.json, vocabulary and sizes; with `verify`, also the tokens of a split on first use."""
        try:
            meta = json.loads((path / "meta.json").read_bytes())
            if meta["format"] != FORMAT or meta["checksum"] != checksum(meta):
                raise ValueError
            hashes = meta.get("vocabulary_files", {}) | {"vocab.tsv": meta["vocabulary_hash"]}
            files = {name: (path / name).read_bytes() for name in hashes}
            for name, data in files.items():
                if hashlib.sha256(data).hexdigest() != hashes[name]:
                    raise _damaged(path, f"{name} has changed since it was prepared")
            width = np.dtype(meta["dtype"]).itemsize
            sizes = {f"{split}.bin": meta["splits"][split]["tokens"] * width for split in SPLITS}
            if len(files) > 1:
                sizes |= {f"{split}.words.bin": meta["splits"][split]["tokens"] for split in SPLITS}
            for name, expected in sizes.items():
                if (size := (path / name).stat().st_size) != expected:
                    raise _damaged(path, f"{name} has {size} bytes instead of {expected}")
        except OSError as error:
            raise _damaged(path, f"{Path(str(error.filename)).name} cannot be read ({error.strerror})") from None
        except (KeyError, TypeError, ValueError, AttributeError):
            raise _damaged(path, f"meta.json is damaged or not of format {FORMAT}") from None
        return cls(path, meta, open_vocabulary(files), set(sizes) if verify else set())

    def split(self, name: str) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Return the ids of train, valid or test, memory-mapped."""
        self._verify(f"{name}.bin", self.meta["splits"][name]["sha256"])
        return np.memmap(self.path / f"{name}.bin", np.dtype(self.meta["dtype"]).newbyteorder("<"), mode="r")

    def text(self, name: str) -> SplitText:
        """Return a split for scoring."""
        marks, record = None, self.meta["splits"][name]
        if isinstance(self.vocabulary, SubwordVocabulary):
            self._verify(f"{name}.words.bin", record["marks_sha256"])
            marks = np.memmap(self.path / f"{name}.words.bin", np.uint8, mode="r")
        num_words = record.get("word_tokens", record["tokens"])
        return SplitText(self.split(name), num_words, record["characters"], marks)

    def verify(self) -> None:
        """Verify the checksums of all splits now rather than on first use."""
        for split in SPLITS:
            self.text(split)

    def _verify(self, name: str, expected: str) -> None:
        """Compare a token file with its checksum, once."""
        if name in self.unchecked:
            if file_hash(self.path / name, label=f"checking {name}", to=sys.stderr) != expected:
                raise _damaged(self.path, f"the checksum of {name} is wrong: it has changed since it was prepared")
            self.unchecked.discard(name)

    def summarize(self, perplexities: Mapping[str, Mapping[str, float]], *, first: int | None = None) -> dict[str, Any]:
        """Summarize the corpus and perplexities by split, also per word and as bits per character."""
        entries: dict[str, Any] = {"source": self.meta["source"], "corpus": self.hashes()}
        for split, values in perplexities.items():
            text = self.text(split)
            entries[split] = {**values, "unigram": self.unigram_perplexity(split, first=first)}
            for unit in ("per_word", "bits_per_character"):
                entries[f"{split}_{unit}"] = {name: getattr(text, unit)(value) for name, value in values.items()}
        return entries

    def hashes(self) -> dict[str, str]:
        """Hashes of the vocabulary and of every split, stored in checkpoints to identify the corpus."""
        splits = {split: str(self.meta["splits"][split]["sha256"]) for split in SPLITS}
        return {"vocabulary": self.vocabulary.hash, **splits}

    def check_unchanged(self, content: dict[str, Any], *, splits: Sequence[str]) -> None:
        """Raise UserError if a checkpoint was trained on another text."""
        current, saved = self.hashes(), content["corpus"]
        if changed := [part for part in ("vocabulary", *splits) if current[part] != saved.get(part)]:
            raise UserError(
                f"{str(self.path)!r} is not what the checkpoint was trained with: the corpus has changed since "
                f"({', '.join(changed)}). Restore it, train a new run, or score a folder of text with data.dir=PATH."
            )

    def unigram_perplexity(self, split: str, *, first: int | None = None) -> float:
        """Perplexity of a split, or of its first tokens, under the unigram distribution of the training text."""
        counts = np.bincount(self.split(split)[:first], minlength=len(self.vocabulary))
        return self.vocabulary.unigram_perplexity(counts)

    @property
    def true_perplexity(self) -> float | None:
        """The lowest perplexity that any model can reach, if the source is synthetic."""
        return self.meta.get("true_perplexity")


def open_corpus(config: DataConfig, *, verify: bool = True, trusted: bool = True) -> Corpus:
    """Open the corpus of these settings, preparing it under `data.root` on first use.

    `verify` compares tokens with their checksums. Settings from a checkpoint are not `trusted`: they must
    not choose where to write or what to download.
    """
    source, path = find_source(config)
    if not path.exists():
        if not trusted and (config.root != DEFAULT_ROOT or getattr(config, "url", None) is not None):
            raise UserError(
                f"The checkpoint's corpus is not prepared at {str(path)!r}, and a checkpoint must not choose where to "
                f"write or what to download. Prepare it with {own_command('prepare')} data={config.name} "
                f"data.root={config.root} and the other data settings in the run's config.yaml."
            )
        from lm.data.prepare import prepare

        prepare(source, path)
    return Corpus.open(path, verify=verify)


def find_source(config: DataConfig) -> tuple[Source, Path]:
    """Return the source from the plug-in `data.name` and the folder of the prepared corpus."""
    source: Source = find_plugin("data", config.name).target(config)
    return source, Path(config.root) / source.folder


def summary(meta: Mapping[str, Any], *, vocabulary: Vocabulary) -> str:
    """Summarize a corpus: source, checksum, tokenization, vocabulary and splits."""
    archive = meta.get("archive", {})
    facts = {"source": meta["source"]} | {key: archive[key] for key in ("path", "url", "sha256") if key in archive}
    if "size" in archive:
        facts["size"] = f"{archive['size']:,} bytes ({byte_size(archive['size'])})"
    facts |= {key: {True: "yes", False: "no"}[v] if isinstance(v, bool) else v for key, v in meta["rule"].items()}
    unknown, ends = (int(vocabulary.counts[id_]) for id_ in (vocabulary.unk_id, vocabulary.eos_id))
    pieces = isinstance(vocabulary, SubwordVocabulary)
    facts["vocabulary"] = (
        f"{len(vocabulary):,} {'pieces' if pieces else 'words'}, including <unk> ({unknown:,} times in training) "
        f"and </s> ({ends:,})"
    )
    if not pieces and (unseen := int((vocabulary.counts == 0).sum()) - (not unknown) - (not ends)):
        facts["vocabulary"] += f"; {unseen:,} of the given words do not occur there"
    width = max(map(len, facts))
    rows = [
        [split, f"{f['tokens']:,}", f"{f['words']:,}", f"{f['characters']:,}", f"{f['oov'] / f['tokens']:.2%}"]
        + ([f"{1 - f['known_word_tokens'] / f['word_tokens']:.2%}"] if pieces else [])
        for split, f in meta["splits"].items()
    ]
    header = ["split", "tokens", "words", "characters", "<unk>", *(["rare words"] if pieces else [])]
    return "\n".join([*(f"{key:{width}}  {value}" for key, value in facts.items()), "", table(rows, header=header)])


def checksum(meta: Mapping[str, Any]) -> str:
    """SHA-256 of meta.json's contents, ignoring formatting and key order."""
    records = {key: value for key, value in meta.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(
        f"{str(path)!r} must be a corpus prepared by this version, but {reason}. Move that folder away and run again "
        "to prepare it, or pass data.root=PATH to prepare it elsewhere."
    )
