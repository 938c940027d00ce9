"""How lines become words: each corpus has one rule, so that a run can read other text exactly as it read its own.

This is the definition; large texts go through `lm/data/fast_encode.py`, which does the same many times faster.
"""

import re
from dataclasses import dataclass

WORD_PATTERN = r"\w+(?:[-'’]\w+)*|[^\w\s]"
"""Runs of word characters with inner hyphens and apostrophes, or single other characters."""
WHITESPACE = r"\S+"
SPACES = r"[^ \n]+"


@dataclass(frozen=True)
class TokenRule:
    """Which words a line holds."""

    pattern: str
    """Regular expression whose matches are the words."""
    lowercase: bool = False
    skip_markup: bool = False
    """Skip lines that start with `<`, such as Europarl's speakers and chapters."""

    def words(self, line: str) -> list[str]:
        """The words of one line."""
        line = line.lower() if self.lowercase else line
        # The first two give the pattern's matches several times faster than the regular expression engine.
        if self.pattern == WHITESPACE:
            return line.split()
        if self.pattern == SPACES:
            return [word for word in line.rstrip("\n").split(" ") if word]
        return re.findall(self.pattern, line)
