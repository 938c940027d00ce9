"""Words back to text that reads well, one word at a time, as generation draws them.

Corpora whose words stood between spaces get single spaces. The others (`tokenize.WORD_PATTERN`) cut punctuation off,
and get it back where writing puts it; reading such a text again gives the same words.
"""

from lm.data.tokenize import WORD_PATTERN, TokenRule

_AFTER_A_WORD = frozenset(".,;:!?%)]}…»”’")
"""No space before these."""
_BEFORE_A_WORD = frozenset("([{«“„‘¿¡$£€@")
"""No space after these."""
_PAIRED = frozenset("\"'`")
"""Open and close in turn."""


class Joiner:
    """Writes one sentence: `add` gives what a word adds to the text."""

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
        """What comes next begins a sentence."""
        self.at_start = self._glued = True
        self._open.clear()
