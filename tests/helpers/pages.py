"""Parse the Markdown pages: code blocks, commands, and the files a page asks its reader to write."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lm.cli import find_mistakes, parse_flags
from tests.conftest import PLAIN, ROOT, composed

RECIPES = sorted(ROOT.glob("docs/adding-*.md"))
"""Pages that extend the project; their commands need the page's files."""
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "data/README.md", *sorted(ROOT.glob("docs/*.md"))]

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
_FILE = re.compile(r"`([\w./-]+\.\w+)`")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    kind: str
    text: str
    file: str | None
    """The last file named in the paragraph before the block."""


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found, end = [], 0
    for match in _BLOCK.finditer(text):
        paragraph = text[end : match.start()].rstrip().rpartition("\n\n")[2]
        end = match.end()
        files = _FILE.findall(paragraph)
        found.append(Block(match[1], match[2], files[-1] if files else None))
    return found


def commands(page: Path) -> list[str]:
    """Return the lines of the page's shell blocks."""
    return [line for block in blocks(page) if block.kind == "sh" for line in block.text.splitlines() if line.strip()]


def write_files(page: Path, *, project: Path) -> list[str]:
    """Write the page's new files, which must not exist yet; return their names."""
    written = []
    for block in blocks(page):
        if block.kind == "sh":
            continue
        assert block.kind != "diff", f"{page.name} changes {block.file}: a plug-in must not need that"
        assert block.file is not None, f"{page.name} does not say where this belongs:\n{block.text}"
        path = project / block.file
        assert not path.exists(), f"{page.name} would overwrite {block.file}"
        path.write_text(block.text)
        written.append(block.file)
    return written


def check_line(arguments: Sequence[str], *, name: str, schema: type) -> None:
    """Assert that a command line is valid."""
    if all(PLAIN.match(text) and "," not in text for text in arguments):
        composed(*arguments, name=name)
    else:
        assert list(find_mistakes(parse_flags(arguments), name, schema)) == []
