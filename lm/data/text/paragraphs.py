"""Split texts that quote each other into paragraphs, without overlap between splits.

A plain split would test on training text: paragraphs are deduplicated, those that still share ten words in a row are
grouped, and each group goes to one split.
"""

import hashlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lm.data.source import SPLITS, Source, Splits, TextFile, TokenizedConfig, text_source
from lm.data.text.tokenize import WORD_PATTERN, TokenRule

SHARED_WORDS = 10
"""Paragraphs sharing this many consecutive words stay in one split; shorter overlaps are common phrases."""
LARGEST_GROUP = 0.01
"""A group with a larger fraction of the tokens goes to training, because it would unbalance a small split."""

Paragraph = tuple[str, ...]

# Underlines of headings and rules of tables are not text, and the same in every text.
_DRAWN_LINE = re.compile(r"^[-=*+~^|. \t]{4,}$", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n\s*\n")


class ParagraphConfig(TokenizedConfig):
    """A text of paragraphs, in lower case."""

    token_rule = TokenRule(WORD_PATTERN, lowercase=True)


def paragraph_source(
    config: ParagraphConfig, texts: Callable[[], Iterable[str]], *, valid_from: float, test_from: float, **more: Any
) -> Source:
    """Make a source with the distinct paragraphs as sentences; `more` goes to `text_source`."""

    def splits(_: Path) -> Splits:
        lines = distinct_paragraphs(texts(), rule=config.token_rule)
        paragraphs = split_paragraphs(list(lines), valid_from=valid_from, test_from=test_from)
        data = {split: "".join(f"{lines[p]}\n" for p in paragraphs[split]).encode() for split in SPLITS}
        return {s: [TextFile(f"the {s} paragraphs", lambda s=s: BytesIO(data[s]), len(data[s]))] for s in SPLITS}  # type: ignore[misc]

    percent = [round(100 * part) for part in (valid_from, test_from - valid_from, 1 - test_from)]
    rule = f"{'/'.join(map(str, percent))} by hash; paragraphs that share {SHARED_WORDS} words in a row stay together"
    return text_source(config, splits, sentences="distinct paragraphs", splits=rule, **more)


def distinct_paragraphs(texts: Iterable[str], *, rule: TokenRule) -> dict[Paragraph, str]:
    """Return distinct paragraphs as words and as one line of text, in order of first occurrence."""
    distinct: dict[Paragraph, str] = {}
    for paragraph in (paragraph for text in texts for paragraph in _BLANK_LINES.split(_DRAWN_LINE.sub("", text))):
        if words := tuple(map(sys.intern, rule.words(paragraph))):
            distinct.setdefault(words, paragraph.replace("\n", " "))
    return distinct


def split_paragraphs(paragraphs: list[Paragraph], *, valid_from: float, test_from: float) -> dict[str, list[Paragraph]]:
    """Order groups by hash, the largest first, and cut at these fractions of the tokens."""
    group_of = group_similar(paragraphs)
    sizes: Counter[int] = Counter()
    for paragraph, group in zip(paragraphs, group_of, strict=True):
        sizes[group] += len(paragraph)
    total = sizes.total()

    def order(group: int) -> tuple[bool, bytes]:
        digest = hashlib.sha256(" ".join(paragraphs[group]).encode()).digest()
        return sizes[group] <= LARGEST_GROUP * total, digest

    split_of: dict[int, str] = {}
    before = 0
    for group in sorted(sizes, key=order):
        middle = (before + sizes[group] / 2) / total
        split_of[group] = SPLITS[(middle >= valid_from) + (middle >= test_from)]
        before += sizes[group]
    splits: dict[str, list[Paragraph]] = {split: [] for split in SPLITS}
    for paragraph, group in zip(paragraphs, group_of, strict=True):
        splits[split_of[group]].append(paragraph)
    return splits


def group_similar(paragraphs: list[Paragraph]) -> list[int]:
    """Link paragraphs that share runs of words (union-find); return each paragraph's first linked one."""
    parent = list(range(len(paragraphs)))

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = number = parent[parent[number]]
        return number

    for pair in _sharing(paragraphs).tolist():
        one, other = sorted(map(root, pair))
        parent[other] = one
    return [root(number) for number in range(len(paragraphs))]


def _sharing(paragraphs: list[Paragraph]) -> npt.NDArray[np.int64]:
    """Yield pairs of paragraphs with a common run of words, enough to link all that share one."""
    number_of: dict[str, int] = {}
    words = np.fromiter((number_of.setdefault(w, len(number_of)) for w in chain.from_iterable(paragraphs)), np.uint64)
    lengths = np.fromiter(map(len, paragraphs), np.int64, len(paragraphs))
    num_runs = len(words) - SHARED_WORDS + 1
    if num_runs < 1:
        return np.empty((0, 2), np.int64)
    # 64-bit hashes replace the runs; among millions, collisions are unlikely.
    run_hashes, multiplier = np.zeros(num_runs, np.uint64), np.uint64(0x9E3779B97F4A7C15)
    mixed = (words + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(29)
    for offset in range(SHARED_WORDS):
        run_hashes *= multiplier
        run_hashes += mixed[offset : offset + num_runs]
    paragraph_of = np.repeat(np.arange(len(paragraphs)), lengths)
    within = paragraph_of[:num_runs] == paragraph_of[SHARED_WORDS - 1 :]
    run_hashes, paragraph_of = run_hashes[within], paragraph_of[:num_runs][within]
    order = np.argsort(run_hashes, kind="stable")
    same = run_hashes[order[1:]] == run_hashes[order[:-1]]
    pairs = np.stack([paragraph_of[order[:-1][same]], paragraph_of[order[1:][same]]], axis=1)
    return np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)
