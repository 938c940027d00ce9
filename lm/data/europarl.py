"""Europarl v7, the source release: proceedings of the European Parliament in 21 languages."""

from collections.abc import Iterator
from pathlib import Path

from lm.config import EuroparlConfig
from lm.data.archive import Published, archive_tag, find_archive, open_members
from lm.data.encode import read_twice
from lm.data.tokenize import read_lines, rule_of
from lm.data.write import Content, Recipe
from lm.errors import UserError

PUBLISHED = Published("europarl.tgz", site="statmt.org/europarl/v7", unpacked="txt")


def recipe(config: EuroparlConfig) -> Recipe:
    patterns = [f"txt/{config.language}/ep-*.txt"]
    rule = rule_of(config)

    def read() -> Content:
        archive = find_archive(config, published=PUBLISHED)
        members = open_members(archive, patterns=patterns, scratch=Path(config.root))
        names = split_files(list(members), where=f"{patterns[0]} in {str(archive)!r}")

        def sentences(split: str) -> Iterator[list[str]]:
            for name in names[split]:
                with members[name]() as file:
                    yield from rule.sentences(read_lines(file, name=name))

        return read_twice(sentences, min_count=config.min_count)

    tag = archive_tag(config, published=PUBLISHED, patterns=patterns)
    return Recipe(
        folder=f"europarl-{config.language}-min{config.min_count}{tag}",
        meta={
            "name": config.name,
            "source": f"Europarl v7, {config.language} ({config.archive or PUBLISHED.file!r})",
            "rule": {
                "min_count": config.min_count,
                "tokens": rule.pattern,
                "lowercase": True,
                "sentences": "lines; empty ones and those that start with < dropped",
                "splits": "files by name; of each hundred the 99th is validation, the 100th test",
            },
        },
        read=read,
    )


def split_files(names: list[str], *, where: str) -> dict[str, list[str]]:
    """Of each hundred files, sorted by name, the 99th is validation and the 100th test."""
    if len(names) < 100:
        raise UserError(
            "data=europarl takes the 99th and the 100th of each hundred files for validation and test, so it needs "
            f"at least 100 files {where}; got {len(names)}. Check data.language and data.archive"
        )
    names = sorted(names)
    valid, test = names[98::100], names[99::100]
    held_out = {*valid, *test}
    return {"train": [name for name in names if name not in held_out], "valid": valid, "test": test}
