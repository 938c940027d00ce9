"""Settings shared by several corpora; each corpus in `corpora/` adds its own."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from lm.config.groups import DataConfig, EncodingErrors
from lm.config.rules import Count, OptionalCount, Range, Resumable
from lm.data.text.tokenize import WHITESPACE, TokenRule
from lm.system.errors import UserError

WEB_ADDRESS = re.compile(r"https?://([^\s/@]+@)?([\w.-]+|\[[\da-f:]+\])(:\d+)?([/?][!-~]*)?", re.ASCII)

ALTERNATIVE = re.compile(r"(?<=.)\(\d+\)$")


@dataclass
class CorpusConfig(DataConfig):
    """A corpus's settings and what follows from them."""

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
    """Keep this many of these words, the most frequent ones, besides <unk> and </s>; null keeps all."""
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
        if self.num_pieces is not None:
            suffixes[f"sp{self.num_pieces}"] = f"{self.num_pieces:,} SentencePiece pieces of the words"
        return suffixes

    @property
    def num_pieces(self) -> int | None:
        """Size of the subword vocabulary; None for words."""
        return self.vocab_size if self.tokenizer == "sentencepiece" else None

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.vocabulary == "":
            yield "data.vocabulary must not be empty. Try data.vocabulary=null."
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
