"""The Python language reference that ships inside every CPython: real English prose, no network.

A sentence is a paragraph. Topics quote each other, so a plain split would test on training text: paragraphs are
deduplicated, those that still share ten words in a row are grouped, and each group goes to one split.
"""

import hashlib
import platform
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO

from lm.config.registry import plugin
from lm.data.corpus import SPLITS
from lm.data.recipes import text_recipe
from lm.data.settings import TokenizedConfig
from lm.data.text.reading import Part, Text
from lm.data.text.tokenize import WORD_PATTERN, TokenRule
from lm.data.write import Recipe
from lm.system.errors import UserError

SHARED_WORDS = 10
"""Paragraphs that share this many words in a row belong to one split; shorter phrases are common language."""
VALID_FROM, TEST_FROM = 0.8, 0.9
"""Fractions of the tokens at which validation and test begin."""
LARGEST_GROUP = 0.01
"""A group with a larger fraction of the tokens goes to training, because it would unbalance a small split."""

Paragraph = tuple[str, ...]

# Underlines of headings and rules of tables are not text, and the same in every topic.
_DRAWN_LINE = re.compile(r"^[-=*+~^|. \t]{4,}$", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n\s*\n")


@dataclass
class PydocConfig(TokenizedConfig):
    """The Python language reference that ships inside every CPython: real prose, no network."""

    @property
    def token_rule(self) -> TokenRule:
        return TokenRule(WORD_PATTERN, lowercase=True)


@plugin("data", "pydoc", PydocConfig)
def recipe(config: PydocConfig) -> Recipe:
    version = platform.python_version()

    def read() -> Text:
        lines = distinct_paragraphs(_topics(), rule=config.token_rule)
        splits = split_paragraphs(list(lines))
        parts = {split: [_as_part(split, map(lines.__getitem__, splits[split]))] for split in SPLITS}
        return Text(parts, config.token_rule)

    return text_recipe(
        config,
        read,
        folder=re.sub(r"[^\w.-]", "_", f"pydoc-{version}-min{config.min_count}"),
        source=f"the language reference of Python {version} (pydoc_data.topics)",
        sentences="distinct paragraphs",
        splits=f"80/10/10 by hash; paragraphs that share {SHARED_WORDS} words in a row stay together",
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
    """Each distinct paragraph as words and as one line of text, in the order of the topics."""
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
    """Order the groups by hash, after the largest ones, and cut at 80 and 90 % of the tokens."""
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
    """For each paragraph the first one that it is linked to by shared runs of words (union-find)."""
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
