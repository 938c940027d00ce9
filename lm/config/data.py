"""The corpora: where each comes from and how its text becomes words."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated
from urllib.parse import urlsplit

from lm.config.rules import Count, MayChange, OptionalCount, Range


@dataclass
class DataConfig:
    """A corpus: where it comes from and how its text becomes words."""

    name: str
    """The variant, as in `data=pydoc`."""
    root: str
    """Folder under which prepared corpora are kept, one folder each."""


class Tokenizer(Enum):
    """What the tokens of a text are; see `lm.data.text.subwords`."""

    words = "words"
    sentencepiece = "sentencepiece"


@dataclass
class TokenizedConfig(DataConfig):
    """A text, whose tokens are the words that the corpus's rule gives, or pieces of these."""

    tokenizer: Tokenizer = field(default=Tokenizer.words, kw_only=True)
    """words, or pieces of words that sentencepiece learns from the training text."""
    vocab_size: OptionalCount = field(default=None, kw_only=True)
    """How many different pieces sentencepiece makes; null for words, whose number follows from data.min_count."""

    @property
    def pieces(self) -> int | None:
        """How many pieces the words are cut into; None where they stay whole."""
        return self.vocab_size if self.tokenizer is Tokenizer.sentencepiece else None

    def problems(self) -> Iterator[str]:
        if self.tokenizer is Tokenizer.sentencepiece and self.vocab_size is None:
            yield (
                "data.tokenizer=sentencepiece needs data.vocab_size, its number of pieces; got null. "
                "Try data.vocab_size=8000"
            )
        if self.tokenizer is Tokenizer.words and self.vocab_size is not None:
            yield (
                "data.vocab_size belongs to data.tokenizer=sentencepiece; how many words there are follows from "
                f"data.min_count. Got {self.vocab_size}. Try data.vocab_size=null, or data.tokenizer=sentencepiece"
            )


class EncodingErrors(Enum):
    """What becomes of bytes that are no text."""

    strict = "strict"
    replace = "replace"

    @property
    def tag(self) -> str:
        """What a corpus's folder adds to its name."""
        return "" if self is EncodingErrors.strict else f"-{self.value}"


@dataclass
class PydocConfig(TokenizedConfig):
    """The Python language reference that ships inside every CPython: real prose, no network."""

    min_count: Count
    """Words seen less often in training become <unk>."""


@dataclass
class ZipfConfig(DataConfig):
    """A seeded Markov source over a Zipfian vocabulary whose true perplexity is known."""

    vocab_size: Annotated[int, Range(least=16)]
    """Words of the source, besides the two marks."""
    tokens: Annotated[int, Range(least=1000)]
    """Training tokens; validation and test get a tenth each."""
    seed: Annotated[int, Range(least=0)]
    """Seed of the source and of its text; not the seed of training."""


@dataclass
class TextConfig(TokenizedConfig):
    """Your own text: one sentence a line, words between spaces; see `lm.data.corpora.text`."""

    dir: str | None
    """Folder that holds train, valid and test, each as .txt, .txt.gz, .txt.xz, .zip or a folder of such files."""
    lowercase: bool
    """Fold the text to lower case."""
    min_count: Count
    """Words seen less often in training become <unk>; with 1 none would, and <unk> itself is not learnt."""
    train: str | None = field(default=None, kw_only=True)
    """Pattern of the training files, as in data.train=news/*.txt.gz, instead of those in data.dir."""
    valid: str | None = field(default=None, kw_only=True)
    """The same for validation."""
    test: str | None = field(default=None, kw_only=True)
    """The same for test."""
    encoding_errors: EncodingErrors = field(default=EncodingErrors.strict, kw_only=True)
    """Bytes that are no text: strict refuses the file, naming the first; replace makes them U+FFFD."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.dir and not (self.train and self.valid and self.test):
            yield (
                "data.dir must name the folder with train.txt, valid.txt and test.txt; got nothing. "
                "Try data=text data.dir=PATH, or data.train=PATTERN data.valid=PATTERN data.test=PATTERN"
            )


@dataclass
class ArchiveConfig(TokenizedConfig):
    """A published corpus, read from its archive or from the folder it was unpacked to."""

    archive: str | None
    """The archive or unpacked folder; null looks in the corpus's own folder, and fetches it where it is not there."""
    url: Annotated[str | None, MayChange]
    """Where to fetch the archive; null for its publisher's address."""
    sha256: str | None
    """Checksum the archive must have; null for the published one, and for none where data.archive is given."""
    min_count: Count
    """Words seen less often in training become <unk>."""
    encoding_errors: EncodingErrors = field(default=EncodingErrors.strict, kw_only=True)
    """Bytes that are no text: strict refuses the file, naming the first; replace makes them U+FFFD."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.url is not None and not _is_web_address(self.url):
            yield f"data.url must begin with http:// or https://; got {self.url!r}. Try data.url=null"
        if self.url is not None and self.archive is not None:
            yield "data.url and data.archive exclude each other: the archive is there already. Leave one of them out"
        if self.sha256 is not None and not re.fullmatch("[0-9a-f]{64}", self.sha256):
            yield f"data.sha256 must be 64 digits of 0-9 and a-f, or null; got {self.sha256!r}. Try data.sha256=null"


def _is_web_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port_is_sound = parts.port is None or parts.port > 0
    except ValueError:
        return False
    printable = url.isascii() and url.isprintable() and " " not in url
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port_is_sound and printable


@dataclass
class Text8Config(ArchiveConfig):
    """Text8: the first 100 M characters of a cleaned English Wikipedia."""


class EuroparlRelease(Enum):
    """The two forms in which Europarl is published; see `lm.data.corpora.europarl`."""

    source = "source"
    aligned = "aligned"


EUROPARL_LANGUAGES = "bg cs da de el en es et fi fr hu it lt lv nl pl pt ro sk sl sv"


@dataclass
class EuroparlConfig(ArchiveConfig):
    """Europarl v7: proceedings of the European Parliament in 21 languages."""

    language: str
    """Two-letter code."""
    release: EuroparlRelease
    """The source release, a file a day, as in the paper; or the side of the pair that is aligned with English."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.language == "en" and self.release is EuroparlRelease.aligned:
            yield (
                "data.release=aligned has no English of its own: each pair holds a part of it. "
                "Try data.language=en data.release=source"
            )
        if self.language not in EUROPARL_LANGUAGES.split():
            yield (f"data.language must be one of {EUROPARL_LANGUAGES}; got {self.language!r}. Try data.language=bg")


class ShardOrder(Enum):
    """The order in which an epoch reads the training shards; see `lm.data.batches`."""

    fixed = "fixed"
    shuffled = "shuffled"


@dataclass
class OneBillionWordConfig(ArchiveConfig):
    """One Billion Word: shuffled English news sentences, already tokenised."""

    shard_order: ShardOrder
    """How training reads the 99 shards: in the published order, as in the paper, or in a new one each epoch."""


from lm.config.registry import plugin  # noqa: E402

for _name, _class in {
    "pydoc": PydocConfig,
    "zipf": ZipfConfig,
    "text": TextConfig,
    "text8": Text8Config,
    "europarl": EuroparlConfig,
    "one_billion_word": OneBillionWordConfig,
}.items():
    plugin("data", _name, _class)(lambda: None)
