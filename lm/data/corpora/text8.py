"""Text8: the first 100 M characters of a cleaned English Wikipedia, a-z and single spaces, on one line.

The first 99 % of the characters are training; the rest is validation and, as in the literature, also test.
`</s>` follows every 1000 words and ends each split.
"""

from dataclasses import dataclass
from pathlib import Path

from lm.config.registry import plugin
from lm.config.rules import Count
from lm.data.fetch.archive import Limits, open_zip_member
from lm.data.fetch.published import Published
from lm.data.recipes import archive_recipe
from lm.data.settings import ArchiveConfig
from lm.data.text.reading import Part, Text
from lm.data.write import Recipe

PUBLISHED = Published(
    "text8.zip",
    url="http://mattmahoney.net/dc/text8.zip",
    unpacked="text8",
    patterns=("text8",),
    limits=Limits(member=2_000_000_000, content=2_000_000_000),
    room=50_000_000,
    size=31_344_016,
    sha256="a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
)
SENTENCE_WORDS = 1000


@dataclass
class Text8Config(ArchiveConfig):
    """Text8: the first 100 M characters of a cleaned English Wikipedia."""

    name: str = "text8"
    min_count: Count = 11


@plugin("data", "text8", Text8Config)
def recipe(config: Text8Config) -> Recipe:
    def read(archive: Path) -> Text:
        train, held_out = _split(archive)
        return Text(
            {"train": [train], "valid": [held_out], "test": [held_out]},
            config.token_rule,
            sentence_words=SENTENCE_WORDS,
            encoding="ascii",
            errors=config.encoding_errors.value,
        )

    return archive_recipe(
        config,
        read,
        published=PUBLISHED,
        folder="text8",
        source="Text8",
        sentences=f"{SENTENCE_WORDS} words",
        splits="first 99 % of the characters; the last 1 % is validation and also test",
    )


def _split(archive: Path) -> tuple[Part, Part]:
    """The first 99 % of the text's bytes, and the rest; the text is in a zip, in a folder or a file of its own."""
    path = archive / PUBLISHED.unpacked if archive.is_dir() else archive
    opens, size = open_zip_member(path, PUBLISHED.unpacked, limits=PUBLISHED.limits)
    end = size * 99 // 100
    return Part(str(archive), opens, stop=end, size=end), Part(str(archive), opens, start=end, size=size - end)
