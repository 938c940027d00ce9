"""Text8: the first 100 M characters of a cleaned English Wikipedia, a-z and single spaces, on one line.

The first 99% of the characters are training; the rest is validation and, as in the literature, also test.
`</s>` follows every 1000 words and ends each split.
"""

from dataclasses import dataclass

from lm.config.groups import Count, plugin
from lm.data.archive import Archive, Files, archive_source
from lm.data.source import ArchiveConfig, Source, Splits

ARCHIVE = Archive(
    "text8.zip",
    ("http://mattmahoney.net/dc/text8.zip",),
    members=("text8",),
    size=31_344_016,
    checksum="a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
    required=("text8",),
)


@dataclass
class Text8Config(ArchiveConfig):
    """Text8: the first 100 M characters of a cleaned English Wikipedia."""

    name: str = "text8"
    min_count: Count = 11


@plugin("data", "text8", Text8Config)
def source(config: Text8Config) -> Source:
    return archive_source(
        config,
        ARCHIVE,
        assign,
        folder="text8",
        source="Text8",
        sentences="1000 words",
        splits="first 99% of the characters; the last 1% is validation and also test",
        sentence_words=1000,
    )


def assign(files: Files) -> Splits:
    text = files["text8"]
    assert text.size is not None
    end = text.size * 99 // 100
    train, held_out = text.cut(0, end), text.cut(end, text.size)
    return {"train": [train], "valid": [held_out], "test": [held_out]}
