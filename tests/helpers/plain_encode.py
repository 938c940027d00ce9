"""Reference tokenization in plain Python; `lm.data.encode` must find the same tokens."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from lm.data.source import BYTE_ORDER_MARK
from lm.data.text.tokenize import TokenRule
from lm.data.text.vocabulary import EOS


class PlainText(NamedTuple):
    """Tokens of a split and the amount of text they represent."""

    tokens: list[str]
    words: int
    characters: int
    size: int


def plain_text(
    files: Sequence[bytes], rule: TokenRule, *, sentence_words: int | None = None, errors: str = "strict"
) -> PlainText:
    """Tokenize line by line, with `</s>` after each line that counts or after every `sentence_words` words."""
    tokens: list[str] = []
    words = characters = size = 0
    for data in files:
        for line in re.findall(rb"[^\n]*\n|[^\n]+", data.removeprefix(BYTE_ORDER_MARK)):
            size += len(line)
            if rule.skip_markup and line.startswith(b"<"):
                continue
            text = line.decode("utf-8", errors)
            if "\0" in text and errors == "strict":
                raise ValueError("zero bytes are not text")
            text = text.replace("\0", "\ufffd")
            line_words = rule.words(text)
            tokens += line_words
            words, characters = words + len(line_words), characters + len(text)
            if sentence_words is None and (line_words or rule.keep_blank_lines):
                tokens.append(EOS)
    if sentence_words:
        starts = range(0, len(tokens), sentence_words)
        tokens = [token for start in starts for token in [*tokens[start : start + sentence_words], EOS]]
    return PlainText(tokens, words, characters, size)
