"""Turn words back into readable text, one word at a time, as generation draws them.

Words of corpora that are split at spaces are joined by spaces. The rule `tokenize.WORD_PATTERN` separates punctuation,
which is attached again here; reading such a text again gives the same words.
"""

import codecs
import re

from lm.data.text.subwords import WORD_START
from lm.data.text.tokenize import WORD_PATTERN, TokenRule
from lm.data.text.vocabulary import UNK

_AFTER_A_WORD = frozenset(".,;:!?%)]}…»”’")
"""No space before these."""
_BEFORE_A_WORD = frozenset("([{«“„‘¿¡$£€@")
"""No space after these."""
_PAIRED = frozenset("\"'`")
"""Open and close in turn."""
_BYTE = re.compile("<0x([0-9A-F]{2})>")


class Joiner:
    """Joins the words of a sentence: `add` returns the text that a word adds."""

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
    """The same for subword pieces; a character spelt in bytes is written with its last byte."""

    def __init__(self, rule: TokenRule) -> None:
        super().__init__(rule)
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._begins = True

    def add(self, word: str) -> str:
        if byte := _BYTE.fullmatch(word):
            return self._write(self._bytes.decode(bytes([int(byte[1], 16)])))
        broken_off = self._write(self._bytes.decode(b"", final=True))
        self._begins = self._begins or word == UNK or word.startswith(WORD_START)
        return broken_off + self._write(word.removeprefix(WORD_START))

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
