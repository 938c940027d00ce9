"""Europarl v7, the source release: proceedings of the European Parliament in 21 languages."""

from pathlib import Path

from lm.config import EuroparlConfig
from lm.data.archive import Published, archive_tag, find_archive, open_members
from lm.data.encode import read_text
from lm.data.reading import Part, Text
from lm.data.tokenize import rule_of
from lm.data.write import Content, Recipe
from lm.errors import UserError

PUBLISHED = Published("europarl.tgz", site="statmt.org/europarl/v7", unpacked="txt")


def recipe(config: EuroparlConfig) -> Recipe:
    patterns = [f"txt/{config.language}/ep-*.txt"]
    rule = rule_of(config)

    def read() -> Content:
        archive = find_archive(config, published=PUBLISHED)
        members = open_members(archive, patterns=patterns, scratch=Path(config.root))
        files = split_files(list(members), where=f"{patterns[0]} in {str(archive)!r}")
        parts = {split: [Part(name, members[name]) for name in names] for split, names in files.items()}
        text = Text(parts, rule, errors=config.encoding_errors.value)
        return read_text(text, min_count=config.min_count, scratch=Path(config.root))

    tag = archive_tag(config, published=PUBLISHED, patterns=patterns)
    return Recipe(
        folder=f"europarl-{config.language}-min{config.min_count}{config.encoding_errors.tag}{tag}",
        meta={
            "name": config.name,
            "source": f"Europarl v7, {config.language} ({config.archive or PUBLISHED.file!r})",
            "rule": {
                "min_count": config.min_count,
                "tokens": rule.pattern,
                "lowercase": True,
                "encoding_errors": config.encoding_errors.value,
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
