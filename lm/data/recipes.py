"""Recipes for the two usual kinds of corpora: any text, and text from a published archive."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm.data.encode import read_text
from lm.data.fetch.published import Published, archive_tag, find_archive
from lm.data.settings import ArchiveConfig, FileConfig, TokenizedConfig
from lm.data.text.reading import Text
from lm.data.write import Content, Recipe


def text_recipe(
    config: TokenizedConfig,
    read: Callable[[], Text],
    *,
    folder: str,
    source: str,
    sentences: str,
    splits: str,
    meta: Mapping[str, Any] | None = None,
    shards: bool = False,
) -> Recipe:
    """A text, counted and encoded by the rule of its settings; `sentences` and `splits` describe it in meta.json."""

    def read_content() -> Content:
        return read_text(
            read(),
            min_count=config.min_count,
            scratch=Path(config.root),
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
    read: Callable[[Path], Text],
    *,
    published: Published,
    folder: str,
    source: str,
    sentences: str,
    splits: str,
    shards: bool = False,
) -> Recipe:
    """A published corpus; `read` gets the archive, or the folder it was unpacked to."""

    def read_archive() -> Text:
        path, facts = find_archive(config, published=published)
        return replace(read(path), facts={"archive": facts})

    tag = archive_tag(config, published=published)
    return text_recipe(
        config,
        read_archive,
        folder=f"{folder}-min{config.min_count}{config.encoding_errors.tag}{tag}",
        source=f"{source} ({config.archive or published.file!r})",
        sentences=sentences,
        splits=splits,
        shards=shards,
    )
