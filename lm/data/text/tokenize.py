"""Split lines into words and join words into text.

Each corpus has one `TokenRule`, so that a run tokenizes other text exactly like its training text. Its `words` method
is the definition; `lm/data/encode.py` finds the same words many times faster.
"""

import codecs
import re
from dataclasses import dataclass

from lm.data.text.vocabulary import EOS, UNK

WORD_PATTERN = r"\w+(?:[-'’]\w+)*|[^\w\s]"
"""Runs of word characters with inner hyphens and apostrophes, or single other characters."""
WHITESPACE = r"\S+"
SPACES = r"[^ \n]+"
WORD_START = "▁"
"""SentencePiece's prefix of pieces that start a word."""

_AFTER_A_WORD = frozenset(".,;:!?%)]}…»”’")
"""Characters without a space before them."""
_BEFORE_A_WORD = frozenset("([{«“„‘¿¡$£€@")
"""Characters without a space after them."""
_PAIRED = frozenset("\"'`")
"""Characters that alternately open and close."""
_BYTE = re.compile("<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class TokenRule:
    """How a line is split into words; a subclass may override `words`."""

    pattern: str
    """Regular expression whose matches are the words."""
    lowercase: bool = False
    skip_markup: bool = False
    """Skip lines that start with `<`, such as Europarl's speakers and chapters."""
    keep_blank_lines: bool = False
    """End blank lines with `</s>` as well, as published WikiText counts do."""

    def words(self, line: str) -> list[str]:
        """Return the words of one line."""
        line = line.lower() if self.lowercase else line
        # `split` is several times faster than these two regular expressions.
        if self.pattern == WHITESPACE:
            return line.split()
        if self.pattern == SPACES:
            return [word for word in line.rstrip("\n").split(" ") if word]
        return re.findall(self.pattern, line)

    def sentence(self, line: str, *, skip_empty: bool = False) -> list[str]:
        """Return a line's words and `</s>`; with `skip_empty`, nothing for blank lines that training ignores."""
        words = self.words(line)
        return [*words, EOS] if words or self.keep_blank_lines or not skip_empty else []

    @property
    def is_compiled(self) -> bool:
        """Whether the compiled scanner implements this rule; other rules run in Python, line by line."""
        return type(self) is TokenRule and self.pattern in (WHITESPACE, SPACES, WORD_PATTERN)


class Joiner:
    """Joins the words of a sentence into readable text: `add` returns the text that a word adds.

    Words split at spaces are joined by spaces. For `WORD_PATTERN`, punctuation is attached to its
    word. Tokenizing the result gives the same words.
    """

    def __init__(self, rule: TokenRule) -> None:
        self.by_spaces = rule.pattern != WORD_PATTERN
        self.at_start = True
        self._glued = True
        self._open: set[str] = set()

    def add(self, word: str) -> str:
        closes = word in _AFTER_A_WORD or word in self._open
        opens = word in _BEFORE_A_WORD or (word in _PAIRED and not closes)
        space = "" if self._glued or (closes and not self.by_spaces) else " "
        if word in _PAIRED:
            self._open ^= {word}
        self._glued = opens and not self.by_spaces
        self.at_start = False
        return space + word

    def end(self) -> None:
        """Start a new sentence."""
        self.at_start = self._glued = True
        self._open.clear()


class PieceJoiner(Joiner):
    """Joins subword pieces; a character that is spelled in bytes is written with its last byte."""

    def __init__(self, rule: TokenRule) -> None:
        super().__init__(rule)
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._begins = True

    def add(self, word: str) -> str:
        if byte := _BYTE.fullmatch(word):
            return self._write(self._bytes.decode(bytes([int(byte[1], 16)])))
        incomplete = self._write(self._bytes.decode(b"", final=True))
        self._begins = self._begins or word == UNK or word.startswith(WORD_START)
        return incomplete + self._write(word.removeprefix(WORD_START))

    def _write(self, letters: str) -> str:
        """The first characters of a word decide whether a space precedes it."""
        if not letters or not self._begins:
            return letters
        self._begins = False
        return super().add(letters)

    def end(self) -> None:
        super().end()
        self._bytes.reset()
        self._begins = True
