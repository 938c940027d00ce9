"""The corpora: where each comes from and how its text becomes words."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from lm.config.rules import Count, Range


@dataclass
class DataConfig:
    """A corpus: where it comes from and how its text becomes words."""

    name: str
    """The variant, as in `data=pydoc`."""
    root: str
    """Folder under which prepared corpora are kept, one folder each."""


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
    """Your own `train.txt`, `valid.txt` and `test.txt`: one sentence a line, words between spaces."""

    dir: str | None
    """Folder that holds the three files."""
    lowercase: bool
    """Fold the text to lower case."""
    min_count: Count
    """Words seen less often in training become <unk>; with 1 none would, and <unk> itself is not learnt."""

    def problems(self) -> Iterator[str]:
        if not self.dir:
            yield (
                "data.dir must name the folder with train.txt, valid.txt and test.txt; got nothing. "
                "Try data=text data.dir=PATH"
            )


@dataclass
class ArchiveConfig(DataConfig):
    """A published corpus, read from its archive or from the folder it was unpacked to."""

    archive: str | None
    """The archive or unpacked folder; by default it is looked for in the corpus's own folder."""
    min_count: Count
    """Words seen less often in training become <unk>."""


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
