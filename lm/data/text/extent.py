"""How much text a split is: in tokens, in words and in characters, and its perplexity by each of them."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lm.data.text.subwords import WORD_END
from lm.data.text.vocabulary import Ids


class Extent(NamedTuple):
    """Turns the perplexity per token of a text into figures that other tokens of the same text share."""

    tokens: int
    words: int
    """Words and `</s>`: the tokens themselves, unless these are pieces of words."""
    characters: int
    """Of the text as it was read, spaces and line ends included."""

    def per_word(self, perplexity: float) -> float:
        """The same probability of the text, shared out among its words."""
        try:
            return math.pow(perplexity, self.tokens / self.words)
        except OverflowError:
            return math.inf

    def bits_per_character(self, perplexity: float) -> float:
        return self.tokens * math.log2(perplexity) / self.characters


@dataclass(frozen=True)
class SplitText:
    """A text to be scored."""

    tokens: Ids
    characters: int
    marks: npt.NDArray[np.uint8] | None
    """Where the tokens are pieces, whose they are: `subwords.KNOWN` and `WORD_END`."""

    @property
    def extent(self) -> Extent:
        words = len(self.tokens) if self.marks is None else int(np.count_nonzero(self.marks & WORD_END))
        return Extent(len(self.tokens), words, self.characters)
