"""Europarl v7: proceedings of the European Parliament in 21 languages, in either of the forms it is published in.

The source release is a file a day, `txt/LL/ep-*.txt`; the aligned release is one file of the sentences that have an
English counterpart, `europarl-v7.LL-en.LL`.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from lm.config.data import EuroparlConfig, EuroparlRelease
from lm.data.encode import read_text
from lm.data.fetch.archive import Limits, Member, Members, open_members
from lm.data.fetch.published import Published, archive_tag, find_archive
from lm.data.text.reading import Part, Text
from lm.data.text.tokenize import rule_of
from lm.data.write import Content, Recipe
from lm.system.errors import UserError

SITE = "https://www.statmt.org/europarl/v7"
BLOCK_LINES = 1000
"""The aligned release has no files to take out for validation and test, but blocks of so many lines."""


def recipe(config: EuroparlConfig) -> Recipe:
    aligned = config.release is EuroparlRelease.aligned
    published, patterns = aligned_release(config.language) if aligned else source_release(config.language)
    rule = rule_of(config)

    def read() -> Content:
        archive = find_archive(config, published=published)
        members = open_members(archive.path, patterns=patterns, limits=published.limits, scratch=Path(config.root))
        where = f"{patterns[0]} in {str(archive.path)!r}"
        parts = split_lines(members, where=where) if aligned else split_files(members, where=where)
        text = Text(parts, rule, errors=config.encoding_errors.value)
        content = read_text(text, min_count=config.min_count, scratch=Path(config.root), pieces=config.pieces)
        return replace(content, facts={"archive": archive.facts})

    pieces = f"blocks of {BLOCK_LINES} lines" if aligned else "files by name"
    tag = archive_tag(config, published=published, patterns=patterns)
    return Recipe(
        folder=f"europarl-{config.language}{'-aligned' if aligned else ''}-min{config.min_count}"
        f"{config.encoding_errors.tag}{tag}",
        meta={
            "name": config.name,
            "source": f"Europarl v7, {config.language} ({config.archive or published.file!r})",
            "rule": {
                "min_count": config.min_count,
                "tokens": rule.pattern,
                "lowercase": True,
                "encoding_errors": config.encoding_errors.value,
                "sentences": "lines; empty ones and those that start with < dropped",
                "splits": f"{pieces}; of each hundred the 99th is validation, the 100th test",
            },
        },
        read=read,
    )


def source_release(language: str) -> tuple[Published, list[str]]:
    """The archive of all languages, and which of its members are wanted."""
    published = Published(
        "europarl.tgz",
        url=f"{SITE}/europarl.tgz",
        unpacked="txt",
        limits=Limits(member=100_000_000, content=50_000_000_000),
        room=1_000_000_000,
    )
    return published, [f"txt/{language}/ep-*.txt"]


def aligned_release(language: str) -> tuple[Published, list[str]]:
    """The archive of a language and English, and which of its members is wanted."""
    file = f"europarl-v7.{language}-en.{language}"
    published = Published(
        f"{language}-en.tgz",
        url=f"{SITE}/{language}-en.tgz",
        unpacked=file,
        limits=Limits(member=3_000_000_000, content=10_000_000_000),
        room=1_000_000_000,
    )
    return published, [file]


def split_files(members: Members, *, where: str) -> dict[str, list[Part]]:
    """Of each hundred files, sorted by name, the 99th is validation and the 100th test."""
    parts = [Part(name, members[name].open, size=members[name].size) for name in sorted(members)]
    return _hundreds(parts, what="files", where=where)


def split_lines(members: Members, *, where: str) -> dict[str, list[Part]]:
    """Of each hundred blocks of lines the 99th is validation and the 100th test."""
    parts: list[Part] = []
    for member in members.values():  # there is one, or none
        ends = block_ends(member, block_lines=BLOCK_LINES)
        for start, stop in zip([0, *ends], ends, strict=False):
            parts.append(Part(member.name, member.open, start, stop, size=stop - start))
    return _hundreds(parts, what=f"blocks of {BLOCK_LINES} lines", where=where)


def block_ends(member: Member, *, block_lines: int) -> list[int]:
    """The bytes at which blocks of so many lines end; the last block may be shorter."""
    ends, num_lines, position = [], 0, 0
    with member.open() as file:
        while data := file.read(1 << 20):
            feeds = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
            first = block_lines - 1 - num_lines % block_lines
            ends += (position + 1 + feeds[first::block_lines]).tolist()
            num_lines += len(feeds)
            position += len(data)
    return ends if ends and ends[-1] == position else [*ends, position]


def _hundreds(parts: list[Part], *, what: str, where: str) -> dict[str, list[Part]]:
    if len(parts) < 100:
        raise UserError(
            f"data=europarl takes the 99th and the 100th of each hundred {what} for validation and test, so it needs "
            f"at least 100 {what} {where}; got {len(parts)}. Check data.language, data.release and data.archive"
        )
    train = [part for index, part in enumerate(parts) if index % 100 < 98]
    return {"train": train, "valid": parts[98::100], "test": parts[99::100]}
