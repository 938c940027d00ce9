"""Europarl v7: proceedings of the European Parliament in 21 languages, in either of its two published forms.

The source release has a file per day, `txt/LL/ep-*.txt`. The aligned release is one file of the sentences that have an
English counterpart, `europarl-v7.LL-en.LL`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np

from lm.config.groups import Count, plugin
from lm.data.archive import Archive, Files, archive_source
from lm.data.source import ArchiveConfig, Source, Splits, TextFile
from lm.data.text.tokenize import WORD_PATTERN, TokenRule
from lm.system.errors import UserError

SITE = "https://www.statmt.org/europarl/v7"
LANGUAGES = "bg cs da de el en es et fi fr hu it lt lv nl pl pt ro sk sl sv"
BLOCK_LINES = 1000
"""The aligned release is a single file, so the held-out unit is a block of this many lines."""


@dataclass
class EuroparlConfig(ArchiveConfig):
    """Europarl v7: proceedings of the European Parliament in 21 languages."""

    name: str = "europarl"
    min_count: Count = 3
    language: str = field(default="bg", kw_only=True)
    """Two-letter code."""
    release: Literal["source", "aligned"] = field(default="source", kw_only=True)
    """source: a file per day, as in the paper; aligned: the sentences that have an English counterpart."""

    token_rule = TokenRule(WORD_PATTERN, lowercase=True, skip_markup=True)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.language == "en" and self.release == "aligned":
            yield "data.release=aligned needs another data.language than en; got en. Try data.release=source."
        if self.language not in LANGUAGES.split():
            yield f"data.language must be one of {LANGUAGES}; got {self.language!r}. Try data.language=bg."


@plugin("data", "europarl", EuroparlConfig)
def source(config: EuroparlConfig) -> Source:
    aligned = config.release == "aligned"
    archive = find_archive(config.language, aligned=aligned)
    units = f"blocks of {BLOCK_LINES} lines" if aligned else "files"

    def assign(files: Files) -> Splits:
        """Assign the 99th of each hundred files or blocks to validation and the 100th to test."""
        texts = [files[name] for name in sorted(files)]
        texts = [block for text in texts for block in blocks(text)] if aligned else texts
        if len(texts) < 100:
            raise UserError(
                f"data=europarl needs at least 100 {units} {archive.members[0]} in {config.archive or archive.file!r}, "
                f"of which the 99th and the 100th are validation and test; got {len(texts)}. Check data.language, "
                "data.release and data.archive."
            )
        train = [text for index, text in enumerate(texts) if index % 100 < 98]
        return {"train": train, "valid": texts[98::100], "test": texts[99::100]}

    return archive_source(
        config,
        archive,
        assign,
        folder=f"europarl-{config.language}{'-aligned' if aligned else ''}",
        source=f"Europarl v7, {config.language}",
        sentences="lines; empty ones and those that start with < dropped",
        splits=f"{units if aligned else 'files by name'}; of each hundred the 99th is validation, the 100th test",
    )


def find_archive(language: str, *, aligned: bool) -> Archive:
    """Return the archive with all languages, or with one language aligned to English."""
    file = f"{language}-en.tgz" if aligned else "europarl.tgz"
    member = f"europarl-v7.{language}-en.{language}" if aligned else f"txt/{language}/ep-*.txt"
    return Archive(file, (f"{SITE}/{file}",), members=(member,))


def blocks(text: TextFile) -> list[TextFile]:
    """Split a file into blocks of lines; the last may be shorter."""
    with text.open() as file:
        data = np.frombuffer(file.read(), np.uint8)
    line_ends = np.flatnonzero(data == ord("\n")) + 1
    cuts = [0, *line_ends[BLOCK_LINES - 1 :: BLOCK_LINES].tolist(), len(data)]
    return [text.cut(start, stop) for start, stop in pairwise(cuts) if start < stop]
