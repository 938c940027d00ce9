"""The Python language reference that ships inside every CPython: real English prose, no network.

A sentence is a paragraph. Topics quote each other; `lm.data.text.paragraphs` keeps the splits apart.
"""

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm.config.registry import plugin
from lm.config.rules import Count
from lm.data.settings import TokenizedConfig
from lm.data.source import Source, Splits, text_source
from lm.data.text.paragraphs import SHARED_WORDS, distinct_paragraphs, paragraphs_of, split_lines
from lm.data.text.tokenize import WORD_PATTERN, TokenRule
from lm.system.errors import UserError

VALID_FROM, TEST_FROM = 0.8, 0.9
"""Fractions of the tokens at which validation and test begin."""


@dataclass
class PydocConfig(TokenizedConfig):
    """The Python language reference that ships inside every CPython: real prose, no network."""

    name: str = "pydoc"
    min_count: Count = 2

    @property
    def token_rule(self) -> TokenRule:
        return TokenRule(WORD_PATTERN, lowercase=True)


@plugin("data", "pydoc", PydocConfig)
def source(config: PydocConfig) -> Source:
    version = platform.python_version()

    def splits(_: Path) -> tuple[Splits, dict[str, Any]]:
        lines = distinct_paragraphs(topic_paragraphs(), rule=config.token_rule)
        return split_lines(lines, valid_from=VALID_FROM, test_from=TEST_FROM), {}

    return text_source(
        config,
        splits,
        folder=f"pydoc-{version}",
        source=f"the language reference of Python {version} (pydoc_data.topics)",
        sentences="distinct paragraphs",
        splits=f"80/10/10 by hash; paragraphs that share {SHARED_WORDS} words in a row stay together",
    )


def topic_paragraphs() -> list[str]:
    """Of all topics, in the order of their names."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError(
            "data=pydoc needs the module pydoc_data.topics, which this Python was built without. Try data=zipf, "
            "which needs no text at all, or data=text data.dir=PATH with your own"
        ) from None
    return [paragraph for topic in sorted(topics) for paragraph in paragraphs_of(topics[topic])]
