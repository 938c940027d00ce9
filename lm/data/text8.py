"""Text8: the first 100 M characters of a cleaned English Wikipedia, a-z and single spaces, on one line.

The first 99 % of the characters are training; the rest is validation and, as in the literature, also test.
`</s>` stands after every 1000 words and at a split's end.
"""

import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import IO

from lm.config import Text8Config
from lm.data.archive import Limits, damage_told, find_zip_member
from lm.data.encode import read_twice
from lm.data.published import Published, archive_tag, find_archive
from lm.data.tokenize import WHITESPACE
from lm.data.write import Content, Recipe
from lm.errors import UserError

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

_BLOCK = 1 << 20


def recipe(config: Text8Config) -> Recipe:
    def read() -> Content:
        archive = find_archive(config, published=PUBLISHED)
        content = read_twice(lambda split: _sentences(archive.path, split=split), min_count=config.min_count)
        return replace(content, facts={"archive": archive.facts})

    tag = archive_tag(config, published=PUBLISHED, patterns=[PUBLISHED.unpacked])
    return Recipe(
        folder=f"text8-min{config.min_count}{tag}",
        meta={
            "name": config.name,
            "source": f"Text8 ({config.archive or PUBLISHED.file!r})",
            "rule": {
                "min_count": config.min_count,
                "tokens": WHITESPACE,
                "lowercase": False,
                "sentences": f"{SENTENCE_WORDS} words",
                "splits": "first 99 % of the characters; the last 1 % is validation and also test",
            },
        },
        read=read,
    )


def _sentences(archive: Path, *, split: str) -> Iterator[list[str]]:
    with _open(archive) as (file, size):
        train_end = size * 99 // 100
        start, stop = (0, train_end) if split == "train" else (train_end, size)
        file.seek(start)  # a zip member is read up to there
        words = _words(file, offset=start, length=stop - start, name=str(archive))
        while sentence := list(islice(words, SENTENCE_WORDS)):
            yield sentence


@contextmanager
def _open(archive: Path) -> Iterator[tuple[IO[bytes], int]]:
    """The text and its size in bytes, from the zip, the folder or the file itself."""
    path = archive / PUBLISHED.unpacked if archive.is_dir() else archive
    with damage_told(archive):
        with path.open("rb") as file:
            if file.read(2) != b"PK":
                yield file, file.seek(0, io.SEEK_END)
                return
        with zipfile.ZipFile(path) as archived:
            info = find_zip_member(archived, PUBLISHED.unpacked, path=path, limits=PUBLISHED.limits)
            with archived.open(info) as member:
                yield member, info.file_size


def _words(file: IO[bytes], *, offset: int, length: int, name: str) -> Iterator[str]:
    """The words of the next `length` bytes; what the end leaves of a word counts as one, as in a plain split."""
    rest = ""
    while length > 0 and (block := file.read(min(_BLOCK, length))):
        if not block.isascii():
            wrong = next(i for i, byte in enumerate(block) if byte > 127)
            raise UserError(
                f"{name!r} must be Text8, that is a-z and spaces; byte {block[wrong]:#04x} at offset "
                f"{offset + wrong} is not. Try data=text for other text"
            )
        offset, length = offset + len(block), length - len(block)
        *words, rest = (rest + block.decode()).replace("\n", " ").split(" ")
        yield from filter(None, words)
    if rest:
        yield rest
