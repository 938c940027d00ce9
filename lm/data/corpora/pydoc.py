"""The Python language reference that ships with every CPython: real English prose, no network.

A sentence is a paragraph. Topics quote each other; `lm.data.text.paragraphs` keeps the splits apart.
"""

import platform
from dataclasses import dataclass

from lm.config.groups import Count, plugin
from lm.data.source import Source
from lm.data.text.paragraphs import ParagraphConfig, paragraph_source
from lm.system.errors import UserError


@dataclass
class PydocConfig(ParagraphConfig):
    """The Python language reference that ships with every CPython: real prose, no network."""

    name: str = "pydoc"
    min_count: Count = 2


@plugin("data", "pydoc", PydocConfig)
def source(config: PydocConfig) -> Source:
    version = platform.python_version()
    description = f"the language reference of Python {version} (pydoc_data.topics)"
    return paragraph_source(
        config, topics, valid_from=0.8, test_from=0.9, folder=f"pydoc-{version}", source=description
    )


def topics() -> list[str]:
    """Return the topics in alphabetical order."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError(
            "data=pydoc needs the module pydoc_data.topics, which this Python lacks. Try data=zipf, which needs no "
            "text, or data=text data.dir=PATH."
        ) from None
    return [topics[name] for name in sorted(topics)]
