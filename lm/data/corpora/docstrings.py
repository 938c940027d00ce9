"""The docstrings of the Python standard library and of the packages that training installs: no network.

Millions of words by thousands of authors about what they know best, with a vocabulary of tens of thousands: the
built-in corpus on which the output layers differ. A sentence is a paragraph.
"""

import hashlib
import platform
import sysconfig
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from lm.config.registry import plugin
from lm.config.rules import Count
from lm.data.settings import TokenizedConfig
from lm.data.source import Source, Splits, text_source
from lm.data.text.docstrings import read_docstrings
from lm.data.text.paragraphs import SHARED_WORDS, distinct_paragraphs, paragraphs_of, split_lines
from lm.data.text.tokenize import WORD_PATTERN, TokenRule

PACKAGES = """
    absl-py fonttools fsspec grpcio Jinja2 matplotlib mpmath networkx numba numpy packaging pillow protobuf pyparsing
    setuptools sympy tensorboard torch Werkzeug
""".split()  # noqa: SIM905
"""Those that training installs, with twenty thousand words of docstrings or more."""
VALID_FROM, TEST_FROM = 0.9, 0.95
"""Fractions of the tokens at which validation and test begin."""
NOT_READ = {"test", "tests", "testing"}
"""Folders of tests, which explain little."""
NOT_EVERYWHERE = {
    "site-packages",
    "dist-packages",
    "distutils",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "tkinter",
    "turtledemo",
}
"""Folders inside the standard library's: of installed packages, and its own that some systems package separately."""


@dataclass
class DocstringsConfig(TokenizedConfig):
    """The docstrings of the Python standard library and of the packages that training installs: no network."""

    name: str = "docstrings"
    min_count: Count = 3

    @property
    def token_rule(self) -> TokenRule:
        return TokenRule(WORD_PATTERN, lowercase=True)


@plugin("data", "docstrings", DocstringsConfig)
def source(config: DocstringsConfig) -> Source:
    versions, absent = installed(PACKAGES)
    named = ", ".join(f"{name} {version}" for name, version in versions.items())

    def splits(_: Path) -> tuple[Splits, dict[str, Any]]:
        files = standard_library() + [file for name in versions for file in files_of(name)]
        paragraphs = (paragraph for text in read_docstrings(files) for paragraph in paragraphs_of(text))
        lines = distinct_paragraphs(paragraphs, rule=config.token_rule)
        return split_lines(lines, valid_from=VALID_FROM, test_from=TEST_FROM), {}

    python = platform.python_version()
    rule = f"{named} without {' '.join(sorted(NOT_READ | NOT_EVERYWHERE))}"
    digest = hashlib.sha256(rule.encode()).hexdigest()[:8]
    return text_source(
        config,
        splits,
        folder=f"docstrings-{python}-{digest}",
        source=f"the docstrings of Python {python}, {named}"
        + (f" (not installed: {', '.join(absent)})" if absent else ""),
        sentences="distinct paragraphs",
        splits=f"90/5/5 by hash; paragraphs that share {SHARED_WORDS} words in a row stay together",
        meta={"packages": versions, "absent_packages": absent},
    )


def installed(names: list[str]) -> tuple[dict[str, str], list[str]]:
    """The versions of those packages that are there, and the names of the others."""
    versions, absent = {}, []
    for name in names:
        try:
            versions[name] = distribution(name).version.partition("+")[0]  # +cpu or +cu130: the same text
        except PackageNotFoundError:
            absent.append(name)
    return versions, absent


def standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    left_out = NOT_READ | NOT_EVERYWHERE
    return sorted(file for file in root.rglob("*.py") if not left_out & set(file.relative_to(root).parts))


def files_of(name: str) -> list[Path]:
    """The Python files of an installed package but for its tests."""
    package = distribution(name)
    listed = [file for file in package.files or [] if file.suffix == ".py" and not NOT_READ & set(file.parts)]
    return sorted(path for file in listed if (path := Path(str(package.locate_file(file)))).is_file())
