"""The corpora: where each comes from and how its text becomes words."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from lm.config.rules import Count, Range


@dataclass
class DataConfig:
    """A corpus: where it comes from and how its text becomes words."""

    name: str
    """The variant, as in `data=pydoc`."""
    root: str
    """Folder under which prepared corpora are kept, one folder each."""


class EncodingErrors(Enum):
    """What becomes of bytes that are no text."""

    strict = "strict"
    replace = "replace"

    @property
    def tag(self) -> str:
        """What a corpus's folder adds to its name."""
        return "" if self is EncodingErrors.strict else f"-{self.value}"


@dataclass
class PydocConfig(DataConfig):
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
class TextConfig(DataConfig):
    """Your own text: one sentence a line, words between spaces; see `lm.data.text`."""

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
        if not self.dir and not (self.train and self.valid and self.test):
            yield (
                "data.dir must name the folder with train.txt, valid.txt and test.txt; got nothing. "
                "Try data=text data.dir=PATH, or data.train=PATTERN data.valid=PATTERN data.test=PATTERN"
            )


@dataclass
class ArchiveConfig(DataConfig):
    """A published corpus, read from its archive or from the folder it was unpacked to."""

    archive: str | None
    """The archive or unpacked folder; by default it is looked for in the corpus's own folder."""
    min_count: Count
    """Words seen less often in training become <unk>."""
    encoding_errors: EncodingErrors = field(default=EncodingErrors.strict, kw_only=True)
    """Bytes that are no text: strict refuses the file, naming the first; replace makes them U+FFFD."""


@dataclass
class Text8Config(ArchiveConfig):
    """Text8: the first 100 M characters of a cleaned English Wikipedia."""


EUROPARL_LANGUAGES = "bg cs da de el en es et fi fr hu it lt lv nl pl pt ro sk sl sv"


@dataclass
class EuroparlConfig(ArchiveConfig):
    """Europarl v7: proceedings of the European Parliament in 21 languages."""

    language: str
    """Two-letter code."""

    def problems(self) -> Iterator[str]:
        if self.language not in EUROPARL_LANGUAGES.split():
            yield (f"data.language must be one of {EUROPARL_LANGUAGES}; got {self.language!r}. Try data.language=bg")


@dataclass
class OneBillionWordConfig(ArchiveConfig):
    """One Billion Word: shuffled English news sentences, already tokenised."""
