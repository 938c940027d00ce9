"""How text becomes sentences of words.

Each corpus has one rule, known by its config's name, so that a run can read another text exactly as it read its
own. Lines end at a line feed and nowhere else; text is UTF-8, and a byte-order mark at its start is skipped.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lm.config import DataConfig
from lm.errors import UserError

WORD_PATTERN = r"\w+(?:[-'’]\w+)*|[^\w\s]"
"""Runs of word characters with inner hyphens and apostrophes, or single other characters."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class TokenRule:
    """Which words a line holds."""

    pattern: str
    """Regular expression whose matches are the words."""
    lowercase: bool = False
    skip_markup: bool = False
    """Drop lines that start with `<`, as Europarl's speakers and chapters do."""

    def words(self, line: str) -> list[str]:
        """The words of one line; empty where the line is to be dropped."""
        if self.skip_markup and line.startswith("<"):
            return []
        return _find_all(self.pattern, line.lower() if self.lowercase else line)

    def sentences(self, lines: Iterable[str]) -> Iterator[list[str]]:
        """The words of each line that holds any."""
        for line in lines:
            if words := self.words(line):
                yield words


WHITESPACE = r"\S+"
SPACES = r"[^ \n]+"


def _find_all(pattern: str, line: str) -> list[str]:
    # Both are what the pattern says, at several times the speed of the regular expression engine.
    if pattern == WHITESPACE:
        return line.split()
    if pattern == SPACES:
        return [word for word in line.rstrip("\n").split(" ") if word]
    return re.findall(pattern, line)


def rule_of(config: DataConfig | dict[str, object]) -> TokenRule:
    """The rule of a corpus, from its config or from the plain values that a checkpoint holds."""
    values = config if isinstance(config, dict) else vars(config)
    match values["name"]:
        case "pydoc":
            return TokenRule(WORD_PATTERN, lowercase=True)
        case "europarl":
            return TokenRule(WORD_PATTERN, lowercase=True, skip_markup=True)
        case "one_billion_word":
            return TokenRule(SPACES)
        case "text":
            return TokenRule(WHITESPACE, lowercase=bool(values["lowercase"]))
        case "text8" | "zipf":
            return TokenRule(WHITESPACE)
        case name:
            raise UserError(
                f"data.name must be pydoc, zipf, text, text8, europarl or one_billion_word; got {name!r}. Try data=text"
            )


def read_lines(file: BinaryIO, *, name: str) -> Iterator[str]:
    """The lines of a UTF-8 file, each with its line feed; a wrong byte is told by file and offset."""
    offset = 0
    for line in file:
        start = len(_BYTE_ORDER_MARK) if offset == 0 and line.startswith(_BYTE_ORDER_MARK) else 0
        try:
            yield line[start:].decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name!r} must be UTF-8 text; byte {line[start + error.start]:#04x} at offset "
                f"{offset + start + error.start} is not. Convert it, for example with iconv -t UTF-8"
            ) from None
        offset += len(line)


def read_text_split(path: Path, *, rule: TokenRule) -> Iterator[list[str]]:
    """The sentences of a text file, one a line; empty lines are dropped, a file without words is refused."""
    empty = True
    try:
        with path.open("rb") as file:
            for sentence in rule.sentences(read_lines(file, name=str(path))):
                empty = False
                yield sentence
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r}: {error.strerror}. Check its permissions") from None
    if empty:
        raise UserError(f"{str(path)!r} must hold at least one word; got none. Put text there, a sentence a line")
