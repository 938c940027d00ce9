"""Text8: the first 100 M characters of a cleaned English Wikipedia, a-z and single spaces, on one line.

The first 99 % of the characters are training; the rest is validation and, as in the literature, also test.
`</s>` stands after every 1000 words and at a split's end.
"""

import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO

from lm.config.data import Text8Config
from lm.data.encode import read_text
from lm.data.fetch.archive import Limits, find_zip_member
from lm.data.fetch.published import Published, archive_tag, find_archive
from lm.data.text.reading import Part, Text, explain_damage
from lm.data.text.tokenize import rule_of
from lm.data.write import Content, Recipe

PUBLISHED = Published(
    "text8.zip",
    url="http://mattmahoney.net/dc/text8.zip",
    unpacked="text8",
    limits=Limits(member=2_000_000_000, content=2_000_000_000),
    room=50_000_000,
    size=31_344_016,
    sha256="a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
)
SENTENCE_WORDS = 1000


def recipe(config: Text8Config) -> Recipe:
    def read() -> Content:
        archive = find_archive(config, published=PUBLISHED)
        train, held_out = _parts(archive.path)
        text = Text(
            {"train": [train], "valid": [held_out], "test": [held_out]},
            rule_of(config),
            sentence_words=SENTENCE_WORDS,
            encoding="ascii",
            errors=config.encoding_errors.value,
        )
        content = read_text(text, min_count=config.min_count, scratch=Path(config.root), pieces=config.pieces)
        return replace(content, facts={"archive": archive.facts})

    tag = archive_tag(config, published=PUBLISHED, patterns=[PUBLISHED.unpacked])
    return Recipe(
        folder=f"text8-min{config.min_count}{config.encoding_errors.tag}{tag}",
        meta={
            "name": config.name,
            "source": f"Text8 ({config.archive or PUBLISHED.file!r})",
            "rule": {
                "min_count": config.min_count,
                "tokens": rule_of(config).pattern,
                "lowercase": False,
                "encoding_errors": config.encoding_errors.value,
                "sentences": f"{SENTENCE_WORDS} words",
                "splits": "first 99 % of the characters; the last 1 % is validation and also test",
            },
        },
        read=read,
    )


def _parts(archive: Path) -> tuple[Part, Part]:
    """The first 99 % of the text's bytes, and the rest."""
    opens, size = _find_text(archive)
    end = size * 99 // 100
    return Part(str(archive), opens, stop=end, size=end), Part(str(archive), opens, start=end, size=size - end)


def _find_text(archive: Path) -> tuple[Callable[[], IO[bytes]], int]:
    """What opens the text, and its size in bytes: from the zip, the folder or the file itself."""
    path = archive / PUBLISHED.unpacked if archive.is_dir() else archive
    with explain_damage(str(archive)):
        with path.open("rb") as file:
            if file.read(2) != b"PK":
                return lambda: path.open("rb"), path.stat().st_size
        archived = zipfile.ZipFile(path)  # closed with the last file that was opened from it
        info = find_zip_member(archived, PUBLISHED.unpacked, path=path, limits=PUBLISHED.limits)
        return partial(archived.open, info), info.file_size
