"""Recipes for the two usual kinds of corpora: any text, and text from a published archive."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm.data.archive import Archive
from lm.data.encode import read_text
from lm.data.settings import ArchiveConfig, FileConfig, TokenizedConfig
from lm.data.text.reading import Part, Text
from lm.data.write import Content, Recipe


def text_recipe(
    config: TokenizedConfig,
    read: Callable[[Path], Text],
    *,
    folder: str,
    source: str,
    sentences: str,
    splits: str,
    meta: Mapping[str, Any] | None = None,
    shards: bool = False,
) -> Recipe:
    """A text, counted and encoded by the rule of its settings; `read` gets a folder for temporary files.

    `sentences` and `splits` describe the text in meta.json.
    """

    def read_content(scratch: Path) -> Content:
        return read_text(
            read(scratch),
            min_count=config.min_count,
            scratch=scratch,
            num_pieces=config.num_pieces,
            max_words=config.max_words,
            lexicon=config.lexicon(),
        )

    rule = config.token_rule
    errors = {"encoding_errors": config.encoding_errors.value} if isinstance(config, FileConfig) else {}
    return Recipe(
        folder=folder,
        meta={
            "name": config.name,
            "source": source,
            **(meta or {}),
            "rule": {
                "min_count": config.min_count,
                "tokens": rule.pattern,
                "lowercase": rule.lowercase,
                **errors,
                "sentences": sentences,
                "splits": splits,
            },
        },
        read=read_content,
        shards=shards,
    )


def archive_recipe(
    config: ArchiveConfig,
    read: Callable[[dict[str, Part]], Text],
    *,
    archive: Archive,
    folder: str,
    source: str,
    sentences: str,
    splits: str,
    shards: bool = False,
) -> Recipe:
    """A published corpus; `read` gets the files of the archive by name."""

    def read_archive(scratch: Path) -> Text:
        path, facts = archive.find(config)
        return replace(read(archive.open(path, scratch=scratch)), facts={"archive": facts})

    return text_recipe(
        config,
        read_archive,
        folder=f"{folder}-min{config.min_count}{config.encoding_errors.tag}{archive.tag(config)}",
        source=f"{source} ({config.archive or archive.file!r})",
        sentences=sentences,
        splits=splits,
        shards=shards,
    )
