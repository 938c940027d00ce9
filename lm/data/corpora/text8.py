"""Text8: the first 100 M characters of a cleaned English Wikipedia, a-z and single spaces, on one line.

The first 99 % of the characters are training; the rest is validation and, as in the literature, also test.
`</s>` follows every 1000 words and ends each split.
"""

from dataclasses import dataclass, replace

from lm.config.registry import plugin
from lm.config.rules import Count
from lm.data.archive import Archive
from lm.data.recipes import archive_recipe
from lm.data.settings import ArchiveConfig
from lm.data.text.reading import Part, Text
from lm.data.write import Recipe
from lm.system.errors import UserError

ARCHIVE = Archive(
    "text8.zip",
    url="http://mattmahoney.net/dc/text8.zip",
    members=("text8",),
    unpacked="text8",
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
    def read(files: dict[str, Part]) -> Text:
        if "text8" not in files:
            raise UserError(f"{config.archive or ARCHIVE.file!r} lacks text8. Download it again from {ARCHIVE.url}.")
        train, held_out = _split(files["text8"])
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
        archive=ARCHIVE,
        folder="text8",
        source="Text8",
        sentences=f"{SENTENCE_WORDS} words",
        splits="first 99 % of the characters; the last 1 % is validation and also test",
    )


def _split(text: Part) -> tuple[Part, Part]:
    """The first 99% of the text's bytes, and the rest."""
    assert text.size is not None
    end = text.size * 99 // 100
    return replace(text, stop=end, size=end), replace(text, start=end, size=text.size - end)
