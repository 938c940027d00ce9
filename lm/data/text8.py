"""Text8: the first 100 M characters of a cleaned English Wikipedia, a-z and single spaces, on one line.

The first 99 % of the characters are training; the rest is validation and, as in the literature, also test.
`</s>` stands after every 1000 words and at a split's end.
"""

import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO

from lm.config import Text8Config
from lm.data.archive import Published, archive_tag, damage_told, find_archive
from lm.data.encode import read_twice
from lm.data.tokenize import WHITESPACE
from lm.data.write import Content, Recipe
from lm.errors import UserError

PUBLISHED = Published("text8.zip", site="mattmahoney.net/dc", unpacked="text8")
SENTENCE_WORDS = 1000

_BLOCK = 1 << 20


def recipe(config: Text8Config) -> Recipe:
    def read() -> Content:
        archive = find_archive(config, published=PUBLISHED)
        return read_twice(lambda split: _sentences(archive, split=split), min_count=config.min_count)

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
        if not zipfile.is_zipfile(path):
            with path.open("rb") as file:
                yield file, file.seek(0, io.SEEK_END)
            return
        with zipfile.ZipFile(path) as archived:
            if PUBLISHED.unpacked not in archived.namelist():
                raise UserError(f"{str(path)!r} must hold a member text8. Fetch {PUBLISHED.file} anew")
            with archived.open(PUBLISHED.unpacked) as member:
                yield member, archived.getinfo(PUBLISHED.unpacked).file_size


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
