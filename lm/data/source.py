"""Sources of text: text files, and the `Source` that every corpus plug-in returns.

A line ends at a line feed or at the end of its file. A byte-order mark at the start of a file is skipped.
"""

import gzip
import hashlib
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from lm.config.groups import SPLITS as SPLITS
from lm.data.settings import FileConfig, TokenizedConfig
from lm.data.text.tokenize import TokenRule
from lm.system.errors import UserError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BEFORE_A_WORD = re.compile(rb" (?=[A-Za-z0-9])")
"""Where a long line may be cut: every compiled tokenizer starts a new word there."""
DAMAGE = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError, RuntimeError)
"""Exceptions raised for damaged archives; zipfile raises RuntimeError for encryption or unknown compression."""


class Chunk(NamedTuple):
    """Consecutive bytes of a file, cut after a line feed or, in a long line, before a word."""

    name: str
    """Name of the file."""
    offset: int
    data: bytes
    ends_file: bool


@dataclass(frozen=True)
class TextFile:
    """A text file or archive member, or a range of its bytes."""

    name: str
    """Name for error messages."""
    open: Callable[[], IO[bytes]]
    size: int | None = None
    """Uncompressed bytes, if known before reading."""
    start: int = 0
    stop: int | None = None

    @classmethod
    def plain(cls, path: Path, name: str | None = None) -> "TextFile":
        """Make a TextFile from an uncompressed file."""
        return cls(name or str(path), lambda: path.open("rb"), path.stat().st_size)

    def cut(self, start: int, stop: int) -> "TextFile":
        """Restrict the file to a range of bytes."""
        return TextFile(self.name, self.open, stop - start, start, stop)

    def chunks(self, size: int, *, within_lines: bool) -> Iterator[Chunk]:
        """Yield chunks of about `size` bytes; the last may be empty. `within_lines` allows cuts inside long lines."""
        with explain_damage(self.name), self.open() as file:
            if self.start:
                file.seek(self.start)
            position = offset = self.start
            held: list[bytes] = []
            while data := file.read(size if self.stop is None else min(size, self.stop - position)):
                position += len(data)
                if position == len(data):
                    data = data.removeprefix(BYTE_ORDER_MARK)
                    offset = position - len(data)
                cut = data.rfind(b"\n") + 1
                if not cut and within_lines:
                    cut = max((m.end() for m in BEFORE_A_WORD.finditer(data, max(0, len(data) - 1000))), default=0)
                held.append(data[:cut] if cut else data)
                if cut:
                    yield Chunk(self.name, offset, b"".join(held), ends_file=False)
                    offset, held = position - len(data) + cut, [data[cut:]]
            yield Chunk(self.name, offset, b"".join(held), ends_file=True)


Splits = Mapping[str, Sequence[TextFile]]
"""The files of train, valid and test, in reading order."""


@dataclass(frozen=True)
class Source:
    """What a corpus plug-in returns: the text, how it becomes tokens, and the name of the prepared folder."""

    folder: str
    """Name of the prepared folder under `data.root`; must differ if text or settings differ."""
    meta: Mapping[str, Any]
    """Entries for meta.json: name, source, tokenization and more."""
    open: Callable[[Path], Splits]
    """Opens the text, given a folder for temporary files; called only if the corpus is not prepared yet."""
    rule: TokenRule
    sentence_words: int | None = None
    """Insert `</s>` after every `sentence_words` words and at the end of a split; None: per line; 0: never."""
    errors: str = "strict"
    """Invalid UTF-8: `strict` raises, `replace` substitutes U+FFFD."""
    shards: bool = False
    """Record where each training file ends, so that epochs can shuffle the files."""
    vocabulary: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `Scanned.vocabulary`: min_count, num_pieces, max_words, lexicon."""


def text_source(
    config: TokenizedConfig,
    open_splits: Callable[[Path], Splits],
    *,
    folder: str,
    source: str,
    sentences: str,
    splits: str,
    meta: Mapping[str, Any] | None = None,
    **options: Any,
) -> Source:
    """Make a source with the vocabulary settings of `config`; `sentences` and `splits` describe it in meta.json.

    `options` are further fields of `Source`.
    """
    rule, suffixes = config.token_rule, config.suffixes()
    errors = config.encoding_errors if isinstance(config, FileConfig) else "strict"
    records = {"min_count": config.min_count, "tokens": rule.pattern, "lowercase": rule.lowercase}
    records |= {"encoding_errors": errors, "sentences": sentences, "splits": splits}
    records |= {"blank_lines": config.blank_lines} if hasattr(config, "blank_lines") else {}
    records |= {"limits": ", ".join(suffixes.values())} if suffixes else {}
    replaced = "" if errors == "strict" else f"-{errors}"
    return Source(
        "-".join([f"{re.sub(r'[^A-Za-z0-9._-]+', '_', folder)}-min{config.min_count}{replaced}", *suffixes]),
        {"name": config.name, "source": source, **(meta or {}), "rule": records},
        open_splits,
        rule,
        errors=errors,
        vocabulary={
            "min_count": config.min_count,
            "num_pieces": config.num_pieces,
            "max_words": config.max_words,
            "lexicon": config.lexicon(),
        },
        **options,
    )


def files_tag(files: Iterable[Path], *more: object) -> str:
    """Hash paths, sizes, modification times and `more` to eight hex digits, without reading the files."""
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr([*stats, *more]).encode(errors="surrogateescape")).hexdigest()[:8]


def decode(data: bytes, *, errors: str, name: str, offset: int) -> str:
    """Decode UTF-8 that begins at `offset` of the file `name`. Zero bytes count as invalid: they are not in text."""
    try:
        text, wrong = data.decode("utf-8", errors), data.find(0)
    except UnicodeDecodeError as error:
        text, wrong = "", error.start
    if wrong < 0:
        return text
    if errors == "replace":
        return text.replace("\0", "\ufffd")
    raise UserError(
        f"{name!r} must be UTF-8 text; got byte {data[wrong]:#04x} at offset {offset + wrong}. "
        "Convert it, for example with iconv -t UTF-8. For a corpus, data.encoding_errors=replace also works."
    )


def read_lines(file: IO[bytes], *, name: str, errors: str = "strict") -> Iterator[str]:
    """Yield lines of UTF-8 text as they arrive, including from a pipe or terminal."""
    offset = 0
    for line in file:
        skip = len(BYTE_ORDER_MARK) if offset == 0 and line.startswith(BYTE_ORDER_MARK) else 0
        yield decode(line[skip:], errors=errors, name=name, offset=offset + skip)
        offset += len(line)


@contextmanager
def explain_damage(name: str) -> Iterator[None]:
    """Convert the exceptions of a damaged archive into a UserError."""
    try:
        yield
    except DAMAGE as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(":")
        raise UserError(
            f"{name!r} must be a complete archive or compressed file; reading it failed ({reason}). Remove it and "
            "download or copy it again."
        ) from None
