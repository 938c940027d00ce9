"""The Python language reference that ships inside every CPython: real English prose, no network.

A sentence is a paragraph. Topics quote each other, so a plain split would test on what training holds: paragraphs
are deduplicated, those that still share ten words in a row are kept together, and each such group goes to one
split.
"""

import hashlib
import platform
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path

from lm.config.data import PydocConfig
from lm.data.corpus import SPLITS
from lm.data.encode import read_text
from lm.data.text.reading import Part, Text
from lm.data.text.tokenize import TokenRule, rule_of
from lm.data.write import Content, Recipe
from lm.system.errors import UserError

SHARED_WORDS = 10
"""Paragraphs that share so many words in a row belong to one split; shorter phrases are just the language."""
VALID_FROM, TEST_FROM = 0.8, 0.9
"""Shares of the tokens at which validation and test begin."""
LARGEST_GROUP = 0.01
"""A group that holds more of the tokens goes to training, so that it cannot unbalance a small split."""

Paragraph = tuple[str, ...]

# Underlines of headings and rules of tables: drawn, not written, and alike in every topic.
_DRAWN_LINE = re.compile(r"^[-=*+~^|. \t]{4,}$", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n\s*\n")


def recipe(config: PydocConfig) -> Recipe:
    version = platform.python_version()

    def read() -> Content:
        lines = distinct_paragraphs(_topics(), rule=rule_of(config))
        splits = split_paragraphs(list(lines))
        parts = {split: [_as_part(split, map(lines.__getitem__, splits[split]))] for split in SPLITS}
        text = Text(parts, rule_of(config))
        return read_text(text, min_count=config.min_count, scratch=Path(config.root), pieces=config.pieces)

    return Recipe(
        folder=re.sub(r"[^\w.-]", "_", f"pydoc-{version}-min{config.min_count}"),
        meta={
            "name": config.name,
            "source": f"the language reference of Python {version} (pydoc_data.topics)",
            "rule": {
                "min_count": config.min_count,
                "tokens": rule_of(config).pattern,
                "lowercase": True,
                "sentences": "distinct paragraphs",
                "splits": f"80/10/10 by hash; paragraphs that share {SHARED_WORDS} words in a row stay together",
            },
        },
        read=read,
    )


def _topics() -> Mapping[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError(
            "data=pydoc needs the module pydoc_data.topics, which this Python was built without. Try data=zipf, "
            "which needs no text at all, or data=text data.dir=PATH with your own"
        ) from None
    found: Mapping[str, str] = topics
    return found


def distinct_paragraphs(topics: Mapping[str, str], *, rule: TokenRule) -> dict[Paragraph, str]:
    """The paragraphs as words and each as one line of text, in the topics' order, only where it first stands."""
    paragraphs: dict[Paragraph, str] = {}
    for topic in sorted(topics):
        for paragraph in _BLANK_LINES.split(_DRAWN_LINE.sub("", topics[topic])):
            if words := tuple(rule.words(paragraph)):
                paragraphs.setdefault(words, paragraph.replace("\n", " "))
    return paragraphs


def _as_part(split: str, lines: Iterable[str]) -> Part:
    data = "".join(f"{line}\n" for line in lines).encode()
    return Part(f"the {split} paragraphs", lambda: BytesIO(data), size=len(data))


def split_paragraphs(paragraphs: list[Paragraph]) -> dict[str, list[Paragraph]]:
    """Lay the groups out in the order of a hash, largest ones first, and cut at 80 and 90 % of the tokens."""
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
        split_of[group] = SPLITS[(middle >= VALID_FROM) + (middle >= TEST_FROM)]
        before += sizes[group]
    splits: dict[str, list[Paragraph]] = {split: [] for split in SPLITS}
    for paragraph, group in zip(paragraphs, group_of, strict=True):
        splits[split_of[group]].append(paragraph)
    return splits


def group_similar(paragraphs: list[Paragraph]) -> list[int]:
    """For each paragraph the first one that shared runs of words link it to (union-find)."""
    parent = list(range(len(paragraphs)))

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = number = parent[parent[number]]
        return number

    first_with: dict[Paragraph, int] = {}
    for number, paragraph in enumerate(paragraphs):
        for start in range(len(paragraph) - SHARED_WORDS + 1):
            run = paragraph[start : start + SHARED_WORDS]
            one, other = sorted((root(number), root(first_with.setdefault(run, number))))
            parent[other] = one
    return [root(number) for number in range(len(paragraphs))]
