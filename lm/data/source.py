"""Sources of text: settings, text files, and the `Source` that every corpus plug-in returns.

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
from typing import IO, Annotated, Any, Literal, NamedTuple

from lm.config.groups import SPLITS as SPLITS
from lm.config.groups import Count, DataConfig, EncodingErrors, OptionalCount, Range, Resumable
from lm.data.text.tokenize import WHITESPACE, TokenRule
from lm.data.text.vocabulary import ALL_WORDS, VocabularyRule
from lm.system.errors import UserError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BEFORE_A_WORD = re.compile(rb" (?=[A-Za-z0-9])")
"""Where a long line may be cut: every compiled tokenizer starts a new word there."""
DAMAGE = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError, RuntimeError)
"""Exceptions raised for damaged archives; zipfile raises RuntimeError for encryption or unknown compression."""


WEB_ADDRESS = re.compile(r"https?://([^\s/@]+@)?([\w.-]+|\[[\da-f:]+\])(:\d+)?([/?][!-~]*)?", re.ASCII)

ALTERNATIVE = re.compile(r"(?<=.)\(\d+\)$")


@dataclass
class CorpusConfig(DataConfig):
    """A corpus's settings and tokenization."""

    @property
    def token_rule(self) -> TokenRule:
        """How lines are split into words, including any text scored later."""
        return TokenRule(WHITESPACE)


def rule_of(config: DataConfig) -> TokenRule:
    assert isinstance(config, CorpusConfig)
    return config.token_rule


@dataclass
class TokenizedConfig(CorpusConfig):
    """A text tokenized into words or subwords."""

    min_count: Count = 1
    """Words seen less often in training become <unk>."""
    max_words: OptionalCount = field(default=None, kw_only=True)
    """Keep at most this many of these words, the most frequent ones, plus <unk> and </s>; null for no limit."""
    vocabulary: str | None = field(default=None, kw_only=True)
    """File whose lines begin with the words to keep, in place of data.min_count; null uses the words of the text."""
    tokenizer: Literal["words", "sentencepiece"] = field(default="words", kw_only=True)
    """words, or subwords that SentencePiece learns from the training text."""
    vocab_size: Annotated[int | None, Range(least=3)] = field(default=None, kw_only=True)
    """Number of SentencePiece pieces; null for words, whose number depends on data.min_count."""

    def lexicon(self) -> frozenset[str] | None:
        """Read the words of the `vocabulary` file, lower-cased if the text is; ignores the rest of each line.

        `the(2)`, the second pronunciation of a word in a lexicon, is the word `the`.
        """
        if self.vocabulary is None:
            return None
        rule = "data.vocabulary must name a text file with a word on each line"
        try:
            text = Path(self.vocabulary).read_text("utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise UserError(f"{rule}; {self.vocabulary!r} cannot be read: {reason}.") from None
        lines = (text.lower() if self.token_rule.lowercase else text).split("\n")
        words = frozenset(ALTERNATIVE.sub("", column[0]) for line in lines if (column := line.split(maxsplit=1)))
        if not words:
            raise UserError(f"{rule}; {self.vocabulary!r} contains none.")
        return words

    def suffixes(self) -> dict[str, str]:
        """Folder suffixes, with explanations, for vocabulary settings other than `min_count`."""
        suffixes = {}
        if self.max_words is not None:
            suffixes[f"max{self.max_words}"] = f"the {self.max_words:,} most frequent words"
        if (lexicon := self.lexicon()) is not None:
            digest = hashlib.sha256("\n".join(sorted(lexicon)).encode()).hexdigest()[:8]
            suffixes[f"of-{digest}"] = f"the {len(lexicon):,} words of {self.vocabulary!r}, whatever their count"
        if self.vocab_size is not None:
            suffixes[f"sp{self.vocab_size}"] = f"{self.vocab_size:,} SentencePiece pieces of the words"
        return suffixes

    def problems(self) -> Iterator[str]:
        if self.tokenizer == "sentencepiece" and self.vocab_size is None:
            yield "data.tokenizer=sentencepiece needs data.vocab_size, the number of pieces. Try data.vocab_size=8000."
        if self.tokenizer == "words" and self.vocab_size is not None:
            yield (
                f"data.vocab_size must be null for data.tokenizer=words; got {self.vocab_size}. Try data.max_words="
                f"{self.vocab_size}, or data.tokenizer=sentencepiece."
            )


@dataclass
class FileConfig(TokenizedConfig):
    """A corpus read from text files."""

    encoding_errors: EncodingErrors = field(default="strict", kw_only=True)
    """Invalid bytes: strict raises an error that names the first one; replace substitutes U+FFFD."""


@dataclass
class ArchiveConfig(FileConfig):
    """A published corpus, read from its archive or from the folder it was unpacked to."""

    archive: str | None = None
    """The archive or its unpacked folder; null uses data.root/NAME and downloads the archive if needed."""
    url: Annotated[str | None, Resumable] = None
    """Address of the archive, for example of a mirror; null for the publisher's."""
    sha256: str | None = None
    """Required checksum of the archive; null for the published one, or for none if data.archive is given."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.url is not None and not WEB_ADDRESS.fullmatch(self.url):
            yield (
                "data.url must be an address that begins with http:// or https://, with spaces written as %20; "
                f"got {self.url!r}. Try data.url=null."
            )
        if self.url is not None and self.archive is not None:
            yield "data.url and data.archive exclude each other. Try data.url=null."
        if self.sha256 is not None and not re.fullmatch("[0-9a-f]{64}", self.sha256):
            yield f"data.sha256 must be 64 digits of 0-9 and a-f, or null; got {self.sha256!r}. Try data.sha256=null."


# ---- text files ------------------------------------------------------------------------------------------------------


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
    vocabulary: VocabularyRule = ALL_WORDS
    """Which words of the training split get an id."""


def text_source(
    config: TokenizedConfig,
    open_splits: Callable[[Path], Splits],
    *,
    folder: str,
    source: str,
    sentences: str = "lines",
    splits: str = "as published",
    meta: Mapping[str, Any] | None = None,
    sentence_words: int | None = None,
) -> Source:
    """Make a source with the vocabulary settings of `config`; `sentences` and `splits` describe it in meta.json."""
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
        sentence_words,
        errors,
        VocabularyRule(config.min_count, config.max_words, config.lexicon(), config.vocab_size),
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
