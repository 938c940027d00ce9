"""One Billion Word: shuffled English news sentences, already tokenised, case kept, in 99 training shards.

Test is held-out shard 0 and validation shard 1. The shards' order is fixed and they form one stream.
"""

from dataclasses import replace
from pathlib import Path

from lm.config.data import OneBillionWordConfig
from lm.data.encode import read_text
from lm.data.fetch.archive import Limits, open_members
from lm.data.fetch.published import Published, archive_tag, find_archive
from lm.data.text.reading import Part, Text
from lm.data.text.tokenize import rule_of
from lm.data.write import Content, Recipe
from lm.system.errors import UserError

TOP = "1-billion-word-language-modeling-benchmark-r13output"
PUBLISHED = Published(
    f"{TOP}.tar.gz",
    url=f"https://www.statmt.org/lm-benchmark/{TOP}.tar.gz",
    unpacked=TOP,
    limits=Limits(member=500_000_000, content=20_000_000_000),
    room=8_000_000_000,
    size=1_792_209_805,
    sha256="01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e",
)
SHARDS = {
    "train": [f"news.en-{number:05d}-of-00100" for number in range(1, 100)],
    "valid": ["news.en.heldout-00001-of-00050"],
    "test": ["news.en.heldout-00000-of-00050"],
}
_LAYOUT = [
    "training-monolingual.tokenized.shuffled/news.en-000[0-9][0-9]-of-00100",
    "heldout-monolingual.tokenized.shuffled/news.en.heldout-0000[01]-of-00050",
]
PATTERNS = [*_LAYOUT, *(f"{TOP}/{pattern}" for pattern in _LAYOUT)]
"""With and without the top folder, so that either may be named."""


def recipe(config: OneBillionWordConfig) -> Recipe:
    rule = rule_of(config)

    def read() -> Content:
        archive = find_archive(config, published=PUBLISHED)
        members = open_members(archive.path, patterns=PATTERNS, limits=PUBLISHED.limits, scratch=Path(config.root))
        if missing := [name for names in SHARDS.values() for name in names if name not in members]:
            listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise UserError(
                f"{str(archive.path)!r} must hold training shards 1 to 99 and held-out shards 0 and 1 of One Billion "
                f"Word; it lacks {listed}. Fetch {PUBLISHED.file} anew from {PUBLISHED.url}"
            )
        parts = {
            split: [Part(name, members[name].open, size=members[name].size) for name in names]
            for split, names in SHARDS.items()
        }
        text = Text(parts, rule, errors=config.encoding_errors.value)
        content = read_text(text, min_count=config.min_count, scratch=Path(config.root), pieces=config.pieces)
        return replace(content, facts={"archive": archive.facts})

    tag = archive_tag(config, published=PUBLISHED, patterns=PATTERNS)
    return Recipe(
        folder=f"one_billion_word-min{config.min_count}{config.encoding_errors.tag}{tag}",
        meta={
            "name": config.name,
            "source": f"One Billion Word ({config.archive or PUBLISHED.file!r})",
            "rule": {
                "min_count": config.min_count,
                "tokens": rule.pattern,
                "lowercase": False,
                "encoding_errors": config.encoding_errors.value,
                "sentences": "lines",
                "splits": "training shards 1 to 99; held-out shard 1 is validation, shard 0 test",
            },
        },
        read=read,
        shards=True,
    )
