"""The Markdown pages as tests see them: code blocks, commands, and the edits that a page asks its reader to make."""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT

RECIPES = sorted(ROOT.glob("docs/adding-*.md"))
"""Pages that change the project: their commands make sense only after their edits."""
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "data/README.md", *sorted(ROOT.glob("docs/*.md"))]

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
_FILE = re.compile(r"`([\w./-]+\.\w+)`")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    kind: str
    text: str
    file: str | None
    """The last file that the paragraph before the block names."""


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
    """The lines of the page's shell blocks."""
    return [line for block in blocks(page) if block.kind == "sh" for line in block.text.splitlines() if line.strip()]


def make_edits(page: Path, *, project: Path) -> None:
    """Do what the page says: write its new files, and change others where the lines of a diff stand exactly once."""
    for block in blocks(page):
        if block.kind == "sh":
            continue
        assert block.file is not None, f"{page.name} does not say where this belongs:\n{block.text}"
        path = project / block.file
        if block.kind != "diff":
            assert not path.exists(), f"{page.name} would overwrite {block.file}"
            path.write_text(block.text)
            continue
        content = path.read_text()
        for hunk in block.text.split("@@\n"):
            lines = hunk.splitlines(keepends=True)
            before = "".join(line[1:] for line in lines if line[0] in " -")
            after = "".join(line[1:] for line in lines if line[0] in " +")
            count = f"\n{content}".count(f"\n{before}")
            assert count == 1, f"{page.name}: {block.file} holds this {count} times, not once:\n{before}"
            content = f"\n{content}".replace(f"\n{before}", f"\n{after}")[1:]
        path.write_text(content)
