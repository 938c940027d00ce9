"""A small synthetic language with frequent and rare words, non-Latin letters and punctuation."""

import random

from lm.data.corpora.text import TextConfig

SYLLABLES = ["ba", "do", "ki", "lu", "me", "no", "ri", "sta", "ver", "ing", "zé"]
PIECES = 300


def make_text(seed: int, *, lines: int, extra: str = "") -> str:
    """Generate lines of words of one to four syllables with a skewed word distribution."""
    chance = random.Random(seed)

    def word() -> str:
        length = chance.choice([1, 1, 2, 2, 3, 4])
        return "".join(SYLLABLES[int(len(SYLLABLES) * chance.random() ** 2)] for _ in range(length))

    made = "\n".join(" ".join(word() for _ in range(chance.randint(1, 9))) for _ in range(lines))
    return f"{made}\n{extra}"


TEXTS = {
    "train": make_text(1, lines=300, extra="a <unk> lone </s>\n\n"),
    "valid": make_text(2, lines=40, extra="Ω😀x <unk> bado\tbado\r\n"),
    "test": make_text(3, lines=30),
}


def in_pieces(config: TextConfig, pieces: int = PIECES) -> TextConfig:
    config.tokenizer, config.vocab_size = "sentencepiece", pieces
    return config
